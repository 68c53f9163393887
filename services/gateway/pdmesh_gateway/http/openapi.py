"""``/openapi.json`` and a page that shows it, without scripts from elsewhere."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import Any

import msgspec

from pdmesh_gateway.http.messages.protocol import CountTokensRequest, MessagesRequest, MessagesResponse, TokenCount
from pdmesh_gateway.http.responses.protocol import (
    InputItemList,
    InputTokenCount,
    InputTokensRequest,
    ResponseObject,
    ResponsesRequest,
)
from pdmesh_gateway.http.unknown import HEADER, OTHERS
from pdmesh_gateway.protocol.chat import ChatBatchRequest, ChatRequest, ChatResponse
from pdmesh_gateway.protocol.completions import CompletionRequest, CompletionResponse
from pdmesh_gateway.protocol.embeddings import EmbeddingRequest, EmbeddingResponse
from pdmesh_gateway.protocol.errors import ErrorResponse
from pdmesh_gateway.protocol.models import ModelCard, ModelList
from pdmesh_gateway.protocol.tokens import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse

#: path → (method, summary, request, response)
_OPERATIONS: dict[str, tuple[str, str, type[msgspec.Struct] | None, type[msgspec.Struct] | None]] = {
    "/v1/chat/completions": ("post", "Answer a conversation", ChatRequest, ChatResponse),
    "/v1/chat/completions/batch": ("post", "Answer several conversations", ChatBatchRequest, ChatResponse),
    "/v1/completions": ("post", "Continue a text", CompletionRequest, CompletionResponse),
    "/v1/embeddings": ("post", "Embed texts", EmbeddingRequest, EmbeddingResponse),
    "/v1/messages": ("post", "Answer a conversation, as Anthropic's API", MessagesRequest, MessagesResponse),
    "/v1/messages/count_tokens": ("post", "Tokens of such a conversation", CountTokensRequest, TokenCount),
    "/v1/responses": ("post", "Answer a conversation of items", ResponsesRequest, ResponseObject),
    "/v1/responses/input_tokens": ("post", "Tokens of such a conversation", InputTokensRequest, InputTokenCount),
    "/v1/responses/{response_id}": ("get", "A response that is kept", None, ResponseObject),
    "/v1/responses/{response_id}/cancel": ("post", "Cancel a response in the background", None, ResponseObject),
    "/v1/responses/{response_id}/input_items": ("get", "What such a response answered", None, InputItemList),
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

#: Answers that may be streamed.
_STREAMED = (ChatResponse, CompletionResponse, MessagesResponse, ResponseObject)


def openapi_document(version: str) -> dict[str, Any]:
    """OpenAPI 3.1."""
    types = [kind for operation in _OPERATIONS.values() for kind in operation[2:] if kind is not None]
    all_types = [*types, ErrorResponse]
    references, components = msgspec.json.schema_components(all_types, ref_template="#/components/schemas/{name}")
    schemas = dict(zip(all_types, references, strict=True))
    error = {"description": "An error", "content": {"application/json": {"schema": schemas[ErrorResponse]}}}
    paths: dict[str, Any] = {}
    for path, (method, summary, request, response) in _OPERATIONS.items():
        ok: dict[str, Any] = {"description": "OK"}
        if response is not None:
            ok["content"] = {"application/json": {"schema": schemas[response]}}
        if response in _STREAMED and request is not None:
            ok["content"]["text/event-stream"] = {"schema": {"type": "string"}}
        operation: dict[str, Any] = {"summary": summary, "responses": {"200": ok, "default": error}}
        if request is not None:
            operation["requestBody"] = {
                "required": True,
                "content": {"application/json": {"schema": schemas[request]}},
            }
            operation["security"] = [{"apiKey": []}]
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
    }


def docs_page(document: dict[str, Any]) -> bytes:
    """The document for people."""
    sections: list[str] = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            fields = ""
            if "requestBody" in operation:
                schema = operation["requestBody"]["content"]["application/json"]["schema"]
                properties = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]["properties"]
                fields = f"<p>Fields: {_listed(properties)}</p>"
            sections.append(
                f"<h2><code>{method.upper()} {html.escape(path)}</code></h2>"
                f"<p>{html.escape(operation['summary'])}</p>{fields}"
            )
    title = f"{document['info']['title']} {document['info']['version']}"
    page = (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title>"
        "<style>body{font:16px/1.5 system-ui,sans-serif;max-width:50rem;margin:2rem auto;padding:0 1rem}"
        "h2{font-size:1.05rem;margin:1.6rem 0 0}p{margin:.3rem 0}</style>"
        f"<h1>{html.escape(title)}</h1><p>Machine-readable: <a href=openapi.json>openapi.json</a></p>"
        + "".join(sections)
        + "<h2>Other fields</h2><p>Fields that are not listed are ignored, and named in the header "
        f"<code>{HEADER.decode()}</code>. Refused unless they ask for nothing: fields of other endpoints that change "
        f"an answer, and {_listed(sorted(OTHERS))}</p>"
    )
    return page.encode()


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"<code>{html.escape(name)}</code>" for name in names)
