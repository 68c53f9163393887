"""``/v1/chat/completions``: what clients send and get."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec

from pdmesh_gateway.protocol.fields import Inert, neutral, shaped
from pdmesh_gateway.protocol.prompt_logprobs import PromptLogprobList
from pdmesh_gateway.protocol.sampling_fields import SamplingFields
from pdmesh_gateway.protocol.usage import Usage


class ContentPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A part of a message's content. Parts that are no text are refused by name."""

    type: str
    text: str | None = None
    refusal: str | None = None
    thinking: Any = None  # reasoning, as Mistral's API has it
    signature: Inert[str | None] = None
    data: Inert[str | None] = None  # reasoning that only its server can read


class ChatMessage(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One message; what a template may look at."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same, under its other name
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None  # an answer's text, where it refuses
    function_call: dict[str, Any] | None = None  # a call as it was before there were several


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
    """``POST /v1/chat/completions``."""

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
    thinking_token_budget: int | None = None  # vLLM's: reasoning ends after so many tokens
    echo: Annotated[bool | None, neutral(False)] = None  # what of the answer was given comes with it
    include_reasoning: Annotated[bool | None, neutral(True)] = None
    reasoning_effort: str | None = None
    mm_processor_kwargs: Inert[dict[str, Any] | None] = None
    prompt_cache_key: Inert[str | None] = None
    prompt_cache_retention: Inert[str | None] = None
    safety_identifier: Inert[str | None] = None
    service_tier: Inert[str | None] = None
    store: Inert[bool | None] = None
    verbosity: Inert[str | None] = None


class ChatTopLogprob(msgspec.Struct):
    """A token that could have been drawn. Log-probabilities are natural; ``bytes`` are those of its UTF-8."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(msgspec.Struct):
    """A token that was drawn, and the most likely ones at its place."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(msgspec.Struct):
    """An entry for each token of a choice, or of a chunk of one."""

    content: list[ChatTokenLogprob]


class FunctionCall(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A called function's name and JSON arguments; a piece of these in a chunk."""

    name: str | None = None
    arguments: str | None = None


class ToolCall(msgspec.Struct, kw_only=True):
    """A call that the answer makes."""

    id: str
    type: str = "function"
    function: FunctionCall


class ToolCallDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What is new of a call; its first one has id, type and name."""

    index: int
    id: str | None = None
    type: str | None = None
    function: FunctionCall


class ChatDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What is new of an answer."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same, under its other name
    tool_calls: list[ToolCallDelta] | None = None


class ResponseMessage(msgspec.Struct, kw_only=True):
    """The answer. It is never a refusal; its content is null where it only calls tools."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same, under its other name
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer. ``finish_reason`` is ``stop``, ``tool_calls`` or ``length``; ``stop_reason`` the string or token id
    that ended it.
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
