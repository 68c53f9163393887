"""Requests and answers of Anthropic's API as msgspec structs.

`pdmesh_gateway.http.unknown` ignores or refuses the API's fields that are not here.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from pdmesh_gateway.protocol.fields import Inert, neutral


class Block(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A part of a message. The type determines which fields are set.

    ``id`` is the id of a call. ``content`` has the parts of a call's result, or findings of a server's tool. ``source``
    is a document's content, or the address of a search result. ``data`` is thinking that only Anthropic can read.
    """

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    content: Any = None
    source: Any = None
    title: str | None = None
    tool_name: str | None = None
    cache_control: Inert[Any] = None
    citations: Inert[Any] = None
    signature: Inert[str | None] = None
    data: Inert[str | None] = None
    is_error: Inert[bool | None] = None
    context: Inert[str | None] = None


class InputMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A message of ``role``."""

    role: str
    content: str | list[Block]


class ToolDefinition(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A function that the answer may call. Tools of types outside `OWN_TYPES` run at Anthropic's servers."""

    OWN_TYPES: ClassVar[tuple[str | None, ...]] = ("custom", None)

    name: str = ""
    type: Inert[str | None] = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: Inert[Any] = None


class ToolChoiceField(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``tool_choice``: the calls that an answer may or must have."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``thinking``: whether the model thinks first. ``budget_tokens`` has no effect."""

    type: str
    display: str | None = None
    budget_tokens: Inert[int | None] = None


class OutputFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Format of the answer's text: JSON that fits a schema."""

    type: str
    schema: Any = None


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``output_config``: the answer's format and the effort of reasoning."""

    format: OutputFormat | None = None
    effort: str | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/messages/count_tokens``. ``output_format`` is the earlier name of ``output_config.format``."""

    model: str
    messages: list[InputMessage]
    system: str | list[Block] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoiceField | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None


class MessagesRequest(CountTokensRequest, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/messages``."""

    max_tokens: int
    stop_sequences: Annotated[list[str] | None, neutral([])] = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    metadata: Inert[dict[str, Any] | None] = None
    service_tier: Inert[str | None] = None
    cache_control: Inert[Any] = None
    # Fields of pdmesh, as in the other endpoints.
    seed: int | None = None
    priority: Inert[int | None] = None
    slo_ttft_ms: Inert[float | None] = None
    slo_tpot_ms: Inert[float | None] = None


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class TokensDetails(msgspec.Struct, kw_only=True):
    """Output tokens by purpose."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct, kw_only=True):
    """Token counts. ``input_tokens`` excludes cached tokens (``cache_read_input_tokens``)."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: TokensDetails


class TextBlock(msgspec.Struct, kw_only=True, tag="text"):
    """Text of an answer."""

    text: str


class ThinkingBlock(msgspec.Struct, kw_only=True, tag="thinking"):
    """Reasoning of the model. The signature is a placeholder without meaning."""

    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, kw_only=True, tag="tool_use"):
    """A call; ``input`` is a JSON object."""

    id: str
    name: str
    input: msgspec.Raw


class MessagesResponse(msgspec.Struct, kw_only=True):
    """An answer; without content in the first event of a stream."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class AnthropicModel(msgspec.Struct, kw_only=True):
    """A model in the list of Anthropic's API; ``created_at`` is RFC 3339."""

    id: str
    type: str = "model"
    display_name: str
    created_at: str
    lifecycle: str = "active"
    max_input_tokens: int
    max_tokens: int


class AnthropicModelList(msgspec.Struct, kw_only=True):
    """The answer to ``GET /v1/models`` for clients of Anthropic's API."""

    data: list[AnthropicModel]
    first_id: str
    last_id: str
    has_more: bool = False


class TokenCount(msgspec.Struct, kw_only=True):
    """The answer to ``POST /v1/messages/count_tokens``."""

    input_tokens: int
