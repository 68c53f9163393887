"""From Anthropic's requests to a conversation, and to how its answer is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pdmesh.errors import RequestRejected
from pdmesh_gateway.conversations import Conversation
from pdmesh_gateway.http.messages.protocol import (
    Block,
    CountTokensRequest,
    InputMessage,
    MessagesRequest,
    ToolChoiceField,
    ToolDefinition,
)
from pdmesh_gateway.protocol.sampling import ResponseFormat, SamplingFields
from pdmesh_gateway.sampling import invalid
from pdmesh_gateway.tools.choosing import Tool, ToolChoice
from pdmesh_gateway.turns import TurnBuilder

_ROLES = ("user", "assistant", "system")


def conversation_of(request: CountTokensRequest) -> Conversation:
    """What a request says, whose last message may be the beginning of the answer. Raises RequestRejected."""
    turns = TurnBuilder()
    if request.system:
        turns.text("system", request.system if isinstance(request.system, str) else _text_of(request.system, "system"))
    for i, message in enumerate(request.messages):
        _add_message(turns, message, f"messages.{i}")
    is_begun = turns.ends_with_answer
    if is_begun and turns.ends_with_call:
        raise invalid("messages", "`messages` ends with a tool_use block: its tool_result must follow.")
    choice = request.tool_choice
    return Conversation(
        messages=turns.messages(),
        tools=tuple(
            Tool(
                name=tool.name,
                description=tool.description,
                parameters=tool.input_schema or {},
                strict=bool(tool.strict),
            )
            for tool in request.tools or []
            if not is_foreign(tool)
        ),
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=not (choice is not None and choice.disable_parallel_tool_use),
        add_generation_prompt=not is_begun,
        continue_final_message=is_begun,
        variables={} if request.thinking is None else {"enable_thinking": request.thinking.type != "disabled"},
    )


def fields_of(request: MessagesRequest) -> SamplingFields:
    """How an answer is drawn. Raises RequestRejected."""
    stops = [stop for stop in request.stop_sequences or [] if stop.strip()]
    if len(stops) < len(request.stop_sequences or []):
        raise invalid("stop_sequences", "`stop_sequences` must not contain blank strings.")
    return SamplingFields(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        stop=stops,
        response_format=_response_format(request),
        seed=request.seed,
        priority=request.priority,
        slo_ttft_ms=request.slo_ttft_ms,
        slo_tpot_ms=request.slo_tpot_ms,
    )


def is_foreign(tool: ToolDefinition) -> bool:
    """Whether a tool runs at Anthropic's, or is none that can be called by its schema: such are skipped."""
    return tool.type not in (None, "custom")


def _add_message(turns: TurnBuilder, message: InputMessage, where: str) -> None:
    if message.role not in _ROLES:
        raise invalid("messages", f"`{where}.role` must be user or assistant, got {message.role[:40]!r}.")
    if isinstance(message.content, str):
        turns.text(message.role, message.content)
        return
    for block in message.content:
        match block.type:
            case "thinking" if message.role == "assistant":
                turns.reasoning(block.thinking or "")
            case "redacted_thinking":
                pass
            case "tool_use" if message.role == "assistant":
                if not block.id or not block.name or not isinstance(block.input, dict):
                    raise invalid("messages", f"`{where}` has a tool_use block without `id`, `name` or `input`.")
                turns.call(block.id, block.name, block.input)
            case "tool_result" if message.role == "user":
                if not block.tool_use_id:
                    raise invalid("messages", f"`{where}` has a tool_result block without `tool_use_id`.")
                content = block.content or ""
                text = content if isinstance(content, str) else _text_of(content, where)
                turns.result(block.tool_use_id, text)
            case _:
                turns.text(message.role, _text_of([block], where))


def _text_of(blocks: Sequence[Block], where: str) -> str:
    """Blocks of text as one. Raises RequestRejected for others."""
    texts: list[str] = []
    for block in blocks:
        text = block.text
        if block.type == "document" and block.source is not None and block.source.type == "text":
            text = block.source.data
        if block.type not in ("text", "document") or text is None:
            raise RequestRejected(
                f"`{where}` has a block of type {block.type[:40]!r}; this model accepts text only.",
                param="messages",
                code="unsupported_value",
            )
        texts.append(text)
    return "\n".join(texts)


def _tool_choice(choice: ToolChoiceField | None) -> ToolChoice:
    if choice is None or choice.type == "auto":
        return ToolChoice()
    if choice.type == "any":
        return ToolChoice(mode="required")
    if choice.type == "none":
        return ToolChoice(mode="none")
    if choice.type == "tool" and choice.name:
        return ToolChoice(mode="required", allowed=(choice.name,), is_named=True)
    raise invalid("tool_choice", f"`tool_choice` is {choice.type[:40]!r}: use auto, any, none, or tool with a `name`.")


def _response_format(request: CountTokensRequest) -> ResponseFormat | None:
    wanted, format_type = request.output_format, _OutputFormat
    if request.output_config is not None and request.output_config.format is not None:
        wanted, format_type = request.output_config.format, _ConfiguredFormat
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        name = format_type.FIELD
        raise invalid(name, f"`{name}.type` is {wanted.type[:40]!r}: use json_schema.")
    return format_type(type="json_schema", schema=wanted.schema)


class _OutputFormat(ResponseFormat, kw_only=True):
    """``output_format`` in the words of ``response_format``."""

    FIELD: ClassVar[str] = "output_format"
    SCHEMA: ClassVar[str] = "output_format.schema"


class _ConfiguredFormat(_OutputFormat, kw_only=True):
    """``output_config.format`` in the words of ``response_format``."""

    FIELD: ClassVar[str] = "output_config.format"
    SCHEMA: ClassVar[str] = "output_config.format.schema"
