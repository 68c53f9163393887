"""Requests and answers of ``/v1/chat/completions``."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec

from pdmesh_gateway.protocol.fields import Inert, neutral, shaped
from pdmesh_gateway.protocol.prompt_logprobs import PromptLogprobList
from pdmesh_gateway.protocol.sampling_fields import SamplingFields
from pdmesh_gateway.protocol.usage import Usage


class ContentPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A part of a message's content. Parts that are not text are refused by name.

    ``thinking`` is reasoning in the form of Mistral's API. ``data`` is reasoning that only its server can read.
    """

    type: str
    text: str | None = None
    refusal: str | None = None
    thinking: Any = None
    signature: Inert[str | None] = None
    data: Inert[str | None] = None


class ChatMessage(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A message, with the fields that a template may read.

    ``reasoning`` is another name of ``reasoning_content``. ``refusal`` is the text of an answer that refuses.
    ``function_call`` is the older form of a single call.
    """

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    function_call: dict[str, Any] | None = None


class FunctionDefinition(msgspec.Struct, kw_only=True):
    """Fields of a chat's function that the answer may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(msgspec.Struct, kw_only=True):
    """Fields of a chat's tool. Tools of other types are skipped."""

    OWN_TYPES: ClassVar[tuple[str | None, ...]] = ("function", None)

    type: Inert[str | None] = None
    function: FunctionDefinition | None = None


class ChatRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/chat/completions``.

    ``thinking_token_budget`` is vLLM's limit of the reasoning tokens. With ``echo`` the answer begins with the part
    that the request contains.
    """

    messages: list[ChatMessage]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: Annotated[bool | None, neutral(False)] = None
    top_logprobs: Annotated[int | None, neutral(0)] = None
    best_of: Annotated[int | None, neutral(1)] = None
    add_generation_prompt: Annotated[bool | None, neutral(True)] = None
    continue_final_message: Annotated[bool | None, neutral(False)] = None
    chat_template: str | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, neutral({})] = None
    documents: Annotated[list[dict[str, Any]] | None, neutral([])] = None
    tools: Annotated[list[dict[str, Any]] | None, shaped(ChatTool), neutral([])] = None
    tool_choice: Annotated[Any, neutral("none", "auto")] = None
    parallel_tool_calls: Annotated[bool | None, neutral(True)] = None
    thinking_token_budget: int | None = None
    echo: Annotated[bool | None, neutral(False)] = None
    include_reasoning: Annotated[bool | None, neutral(True)] = None
    reasoning_effort: str | None = None
    mm_processor_kwargs: Inert[dict[str, Any] | None] = None
    prompt_cache_retention: Inert[str | None] = None
    safety_identifier: Inert[str | None] = None
    service_tier: Inert[str | None] = None
    store: Inert[bool | None] = None
    verbosity: Inert[str | None] = None


class ChatTopLogprob(msgspec.Struct):
    """A token that could have been drawn, with its natural log-probability and its UTF-8 ``bytes``."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(msgspec.Struct):
    """A drawn token, and the likeliest tokens at its position."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of each token of a choice or chunk."""

    content: list[ChatTokenLogprob]


class FunctionCall(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A called function's name and JSON arguments; in a chunk, a piece of the arguments."""

    name: str | None = None
    arguments: str | None = None


class ToolCall(msgspec.Struct, kw_only=True):
    """A call that the answer makes."""

    id: str
    type: str = "function"
    function: FunctionCall


class ToolCallDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """New part of a call. The first part has id, type and name."""

    index: int
    id: str | None = None
    type: str | None = None
    function: FunctionCall


class ChatDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """New part of an answer. ``reasoning`` is another name of ``reasoning_content``."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ResponseMessage(msgspec.Struct, kw_only=True):
    """The answer, which is never a refusal. ``content`` is null if the answer only calls tools.

    ``reasoning`` is another name of ``reasoning_content``.
    """

    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """An answer. ``finish_reason`` is ``stop``, ``tool_calls`` or ``length``.

    ``stop_reason`` is the string or token id that ended the answer.
    """

    index: int
    message: ResponseMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatResponse(msgspec.Struct, kw_only=True):
    """A whole answer to ``POST /v1/chat/completions``; ``created`` is Unix time in seconds."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobList | None = None
    prompt_token_ids: list[int] | None = None
