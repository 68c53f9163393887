"""Requests and answers of OpenAI's responses API as msgspec structs.

Items and tools are plain objects, because clients send kinds of both that no server knows: `responses_requests` reads
them.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from pdmesh_gateway.protocol.chat_protocol import ChatTokenLogprob
from pdmesh_gateway.protocol.fields import Inert, neutral, shaped
from pdmesh_gateway.protocol.sampling_fields import StreamOptions


class Reasoning(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``reasoning``: the effort of reasoning. No summary is ever made."""

    effort: str | None = None
    summary: str | None = None


class TextFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``text.format``: the format of the answer's text."""

    type: str
    name: Inert[str | None] = None
    description: Inert[str | None] = None
    schema: Any = None
    strict: Inert[bool | None] = None


class FunctionTool(msgspec.Struct, kw_only=True):
    """Fields of a function that the answer may call. Tools of other types are skipped."""

    OWN_TYPES: ClassVar[tuple[str | None, ...]] = ("function",)

    type: Inert[str]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class InputPart(msgspec.Struct, kw_only=True):
    """Fields of a part of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: Any = None
    logprobs: Any = None


class InputItem(msgspec.Struct, kw_only=True):
    """Fields of an item that is a message. Items of other types may have any fields."""

    OWN_TYPES: ClassVar[tuple[str | None, ...]] = ("message", None)

    type: str | None = None
    role: str
    content: str | list[InputPart]
    id: str | None = None
    phase: str | None = None
    status: str | None = None


class TextOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``text``: options of the answer's text."""

    format: TextFormat | None = None
    verbosity: str | None = None


class InputTokensRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/responses/input_tokens``: the fields of a request that make its prompt.

    No prompt is ever cut, whatever ``truncation`` says.
    """

    model: str | None = None
    input: Annotated[str | list[dict[str, Any]] | None, shaped(InputItem)] = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[dict[str, Any]] | None, shaped(FunctionTool), neutral([])] = None
    tool_choice: Annotated[str | dict[str, Any] | None, neutral("none", "auto")] = None
    parallel_tool_calls: Annotated[bool | None, neutral(True)] = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, neutral({})] = None
    truncation: Inert[str | None] = None


class ResponsesRequest(InputTokensRequest, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/responses``. With ``background`` the client need not wait for the answer."""

    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    store: Inert[bool | None] = None
    include: Annotated[list[str] | None, neutral([])] = None
    metadata: Inert[dict[str, str] | None] = None
    user: Inert[str | None] = None
    top_logprobs: Annotated[int | None, neutral(0)] = None
    max_tool_calls: Inert[int | None] = None
    prompt_cache_key: Inert[str | None] = None
    prompt_cache_retention: Inert[str | None] = None
    safety_identifier: Inert[str | None] = None
    service_tier: Inert[str | None] = None
    stream_options: Inert[StreamOptions | None] = None
    client_metadata: Inert[dict[str, Any] | None] = None
    background: Annotated[bool | None, neutral(False)] = None
    # Fields of vLLM and pdmesh, as in the other endpoints.
    enable_response_messages: Annotated[bool | None, neutral(False)] = None
    top_k: int | None = None
    min_p: Annotated[float | None, neutral(0)] = None
    seed: int | None = None
    stop: Annotated[str | list[str] | None, neutral([])] = None
    repetition_penalty: Annotated[float | None, neutral(1)] = None
    priority: Inert[int | None] = None
    request_id: Inert[str | None] = None
    slo_ttft_ms: Inert[float | None] = None
    slo_tpot_ms: Inert[float | None] = None


Status = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(msgspec.Struct, kw_only=True, tag="output_text"):
    """Text of an answer."""

    annotations: list[Any] = []
    logprobs: list[ChatTokenLogprob] = []
    text: str


class OutputMessage(msgspec.Struct, kw_only=True, tag="message"):
    """An item of text."""

    id: str
    status: Status
    role: str = "assistant"
    content: list[OutputText]


class OutputReasoningText(msgspec.Struct, kw_only=True, tag="reasoning_text"):
    """Reasoning of the model, in full."""

    text: str


class OutputReasoning(msgspec.Struct, kw_only=True, tag="reasoning"):
    """An item of reasoning."""

    id: str
    status: Status
    summary: list[Any] = []
    content: list[OutputReasoningText]
    encrypted_content: None = None


class OutputCall(msgspec.Struct, kw_only=True, tag="function_call"):
    """A call; ``arguments`` is the text of a JSON object, possibly cut if the status is ``incomplete``."""

    id: str
    status: Status
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | OutputReasoning | OutputCall


class RawMessage(msgspec.Struct, kw_only=True, tag="raw_message_tokens"):
    """A prompt or an answer as the model reads or writes it, in vLLM's shape."""

    message: str
    tokens: list[int]


class InputTokensDetails(msgspec.Struct, kw_only=True):
    """Prompt tokens that were cached."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, kw_only=True):
    """Output tokens by purpose."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, kw_only=True):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, kw_only=True):
    """Reason why a response is incomplete."""

    reason: str


class ResponseFailure(msgspec.Struct, kw_only=True):
    """Reason why a response failed."""

    code: str
    message: str


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response: the fields of its request, its state and its output. ``created_at`` is Unix time in seconds."""

    id: str
    object: str = "response"
    created_at: int
    status: Status
    background: bool = False
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: Reasoning
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool
    temperature: float
    text: TextOptions
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int = 0
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]
    # Set only if `enable_response_messages` asks for them.
    input_messages: list[RawMessage] | msgspec.UnsetType = msgspec.UNSET
    output_messages: list[RawMessage] | msgspec.UnsetType = msgspec.UNSET


class ResponseDeleted(msgspec.Struct, kw_only=True):
    """The answer to ``DELETE /v1/responses/{id}``."""

    id: str
    object: str = "response"
    deleted: bool = True


class InputItemList(msgspec.Struct, kw_only=True):
    """The answer to ``GET /v1/responses/{id}/input_items``."""

    object: str = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokenCount(msgspec.Struct, kw_only=True):
    """The answer to ``POST /v1/responses/input_tokens``."""

    object: str = "response.input_tokens"
    input_tokens: int
