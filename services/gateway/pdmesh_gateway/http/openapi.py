"""The document ``/openapi.json``, which the page at ``/docs`` shows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from pdmesh_gateway.http.messages.messages_protocol import (
    CountTokensRequest,
    MessagesRequest,
    MessagesResponse,
    TokenCount,
)
from pdmesh_gateway.http.openai_errors import ErrorResponse
from pdmesh_gateway.http.responses.responses_protocol import (
    InputItemList,
    InputTokenCount,
    InputTokensRequest,
    ResponseObject,
    ResponsesRequest,
)
from pdmesh_gateway.http.unknown import HEADER, OTHERS
from pdmesh_gateway.protocol.chat_protocol import ChatRequest, ChatResponse
from pdmesh_gateway.protocol.completions_protocol import (
    DEFAULT_COMPLETION_TOKENS,
    CompletionRequest,
    CompletionResponse,
)
from pdmesh_gateway.protocol.embeddings_protocol import EmbeddingRequest, EmbeddingResponse
from pdmesh_gateway.protocol.models_protocol import ModelCard, ModelList
from pdmesh_gateway.protocol.tokens_protocol import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)

#: Method, summary, request and response by path.
_OPERATIONS: dict[str, tuple[str, str, type[msgspec.Struct] | None, type[msgspec.Struct] | None]] = {
    "/v1/chat/completions": ("post", "Answer a conversation", ChatRequest, ChatResponse),
    "/v1/completions": ("post", "Continue a text", CompletionRequest, CompletionResponse),
    "/v1/embeddings": ("post", "Embed texts", EmbeddingRequest, EmbeddingResponse),
    "/v1/messages": ("post", "Answer a conversation, as Anthropic's API", MessagesRequest, MessagesResponse),
    "/v1/messages/count_tokens": ("post", "Tokens of such a conversation", CountTokensRequest, TokenCount),
    "/v1/responses": ("post", "Answer a conversation of items", ResponsesRequest, ResponseObject),
    "/v1/responses/input_tokens": ("post", "Tokens of such a conversation", InputTokensRequest, InputTokenCount),
    "/v1/responses/{response_id}": ("get", "A response that is kept", None, ResponseObject),
    "/v1/responses/{response_id}/cancel": ("post", "Cancel a response in the background", None, ResponseObject),
    "/v1/responses/{response_id}/input_items": ("get", "What such a response answered", None, InputItemList),
    "/v1/sessions": ("get", "Sessions of the key, the newest first", None, None),
    "/v1/sessions/{name}": ("delete", "End a session: no more of its requests are expected", None, None),
    "/v1/models": ("get", "The models served here", None, ModelList),
    "/v1/models/{model}": ("get", "One model", None, ModelCard),
    "/invocations": ("post", "As the endpoint that the body is for, for SageMaker", None, None),
    "/tokenize": ("post", "Text or conversation to token ids", TokenizeRequest, TokenizeResponse),
    "/detokenize": ("post", "Token ids to text", DetokenizeRequest, DetokenizeResponse),
    "/tokenizer_info": ("get", "What the checkpoint says of its tokenizer", None, None),
    "/load": ("get", "Number of requests that are being answered", None, None),
    "/health": ("get", "200 if a request would be served, else 503", None, None),
    "/ready": ("get", "200 if a request would be served, else 503", None, None),
    "/live": ("get", "200 while the process answers", None, None),
    "/ping": ("get", "As /health", None, None),
    "/metrics": ("get", "Prometheus metrics", None, None),
    "/version": ("get", "The version of pdmesh, and whether its scheduling core is compiled", None, None),
}

_CHAT = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 64}

#: Example bodies by path, which work with every model; the model's name is added.
_EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**_CHAT, "temperature": 0},
    "/v1/completions": {"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0},
    "/v1/embeddings": {"input": ["The capital of France is Paris."]},
    "/v1/messages": _CHAT,
    "/v1/messages/count_tokens": {"messages": _CHAT["messages"]},
    "/v1/responses": {"input": "What is the capital of France?", "max_output_tokens": 64},
    "/v1/responses/input_tokens": {"input": "What is the capital of France?"},
    "/invocations": _CHAT,
    "/tokenize": {"prompt": "The capital of France is"},
    "/detokenize": {"tokens": [1, 2, 3]},
}

#: Defaults of OpenAI's API for optional fields, where the checkpoint has no others.
_DEFAULTS: dict[str, Any] = {"temperature": 1, "top_p": 1, "n": 1, "stream": False}

#: Answers that may be streamed.
_STREAMED = (ChatResponse, CompletionResponse, MessagesResponse, ResponseObject)


def openapi_document(version: str, model: str, sampling: Mapping[str, float]) -> dict[str, Any]:
    """Return an OpenAPI 3.1 document; ``sampling`` are the model's defaults for sampling fields."""
    types = [kind for operation in _OPERATIONS.values() for kind in operation[2:] if kind is not None]
    all_types = [*types, ErrorResponse]
    references, components = msgspec.json.schema_components(all_types, ref_template="#/components/schemas/{name}")
    schemas = dict(zip(all_types, references, strict=True))
    for kind in (ChatRequest, CompletionRequest):
        properties = components[kind.__name__]["properties"]
        for name, value in {**_DEFAULTS, **sampling}.items():
            properties[name]["default"] = value
    components[CompletionRequest.__name__]["properties"]["max_tokens"]["default"] = DEFAULT_COMPLETION_TOKENS
    error = {"description": "An error", "content": {"application/json": {"schema": schemas[ErrorResponse]}}}
    paths: dict[str, Any] = {}
    for path, (method, summary, request, response) in _OPERATIONS.items():
        ok: dict[str, Any] = {"description": "OK"}
        if response is not None:
            ok["content"] = {"application/json": {"schema": schemas[response]}}
        if response in _STREAMED and request is not None:
            ok["content"]["text/event-stream"] = {"schema": {"type": "string"}}
        operation: dict[str, Any] = {"summary": summary, "responses": {"200": ok, "default": error}}
        if path in _EXAMPLES:
            content: dict[str, Any] = {"example": {"model": model, **_EXAMPLES[path]}}
            if request is not None:
                content["schema"] = schemas[request]
            operation["requestBody"] = {"required": True, "content": {"application/json": content}}
            # A mesh may require no key.
            operation["security"] = [{}, {"apiKey": []}]
        if names := re.findall(r"{(\w+)}", path):
            operation["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
            ]
        paths[path] = {method: operation}
    return {
        "openapi": "3.1.0",
        "info": {"title": "pdmesh gateway", "version": version},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"apiKey": {"type": "http", "scheme": "bearer"}}},
        "x-refused-fields": sorted(OTHERS),
        "x-ignored-fields-header": HEADER.decode(),
    }
