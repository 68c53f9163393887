"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from pdmesh.errors import RequestRejected
from pdmesh_gateway.conversation_turns import arguments_of, built, reasoning_variables
from pdmesh_gateway.conversations import Conversation
from pdmesh_gateway.dialects import CHAT
from pdmesh_gateway.http.chat_rendering import ChatRendering
from pdmesh_gateway.http.generation_endpoint import GenerationEndpoint, Rendering
from pdmesh_gateway.http.http_exchange import Exchange
from pdmesh_gateway.http.openai_tools import chat_tools, tool_choice_of
from pdmesh_gateway.jobs import GenerationJob
from pdmesh_gateway.message_parts import REASONING, reasoning_of, skip_warnings, text_of
from pdmesh_gateway.protocol.chat_protocol import ChatMessage, ChatRequest
from pdmesh_gateway.protocol.tokens_protocol import TokenizeRequest
from pdmesh_gateway.sampling import MAX_LOGPROBS, check_stream_options, invalid, num_choices, number, truncation_of
from pdmesh_gateway.serving import Serving

#: Upper limit of the budget of reasoning, which is more than any context.
MAX_THINKING_TOKENS = 1 << 24

#: Value of the budget that means no limit.
UNLIMITED = -1


class ChatEndpoint(GenerationEndpoint[ChatRequest]):
    """``POST /v1/chat/completions``: an answer to a conversation, rendered by the model's template."""

    dialect = CHAT

    def __init__(self, serving: Serving) -> None:
        super().__init__(serving, ChatRequest)

    async def prepare(self, request: ChatRequest, exchange: Exchange) -> tuple[GenerationJob, Rendering]:
        serving = self._serving
        serving.check_model(request.model)
        check_stream_options(request)
        serving.with_defaults(request)
        n = num_choices(request, best_of=request.best_of, max_n=serving.config.max_n)
        number("max_tokens", request.max_tokens, low=1)
        number("max_completion_tokens", request.max_completion_tokens, low=1)
        number("thinking_token_budget", request.thinking_token_budget, low=UNLIMITED, high=MAX_THINKING_TOKENS)
        asked = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
        serving.check_load(num_prompts=1, n=n)
        conversation = await conversation_of(request, request.messages, serving)
        job, answers = await self.conversation_job(
            conversation, request, exchange, max_tokens=asked, logprobs=_num_top_logprobs(request), n=n
        )
        rendering = ChatRendering(
            request,
            serving.tokenizer,
            answers,
            model=request.model or serving.model,
            job=job,
            is_named=conversation.tool_choice.is_named,
            echoed=_echoed(conversation) if request.echo else "",
        )
        return job, rendering


async def conversation_of(
    request: ChatRequest | TokenizeRequest, messages: Sequence[ChatMessage], serving: Serving
) -> Conversation:
    """Return a chat's messages as a conversation under its request's fields.

    Raise RequestRejected if one is invalid.
    """
    skipped: set[str] = set()
    conversation = await built(
        lambda: Conversation(messages=template_messages(messages, skipped)),
        num_parts=sum(len(message.content) if isinstance(message.content, list) else 1 for message in messages),
        num_messages=len(messages),
        most=serving.config.max_messages,
        param="messages",
    )
    tools, warnings = chat_tools(request.tools)
    variables = reasoning_variables(request.chat_template_kwargs, request.reasoning_effort)
    if request.documents is not None:
        variables["documents"] = request.documents
    conversation = replace(
        conversation,
        add_generation_prompt=request.add_generation_prompt is not False,
        continue_final_message=bool(request.continue_final_message),
        add_special_tokens=bool(request.add_special_tokens),
        template=request.chat_template,
        tools=tools,
        variables=variables,
    )
    if isinstance(request, TokenizeRequest):
        return conversation
    return replace(
        conversation,
        tool_choice=tool_choice_of(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls is not False,
        include_reasoning=request.include_reasoning is not False,
        max_reasoning_tokens=None if request.thinking_token_budget == UNLIMITED else request.thinking_token_budget,
        truncation=truncation_of(request.truncate_prompt_tokens, request.truncation_side),
        token_ids=_token_ids_of(request.kv_transfer_params),
        warnings=(*warnings, *skip_warnings(skipped, "parts")),
    )


def _token_ids_of(kv_transfer_params: Mapping[str, Any] | None) -> list[int] | None:
    """Return the prompt's token ids if a router sends them from another server, else None.

    Raise RequestRejected unless they are a list of integers.
    """
    given = (kv_transfer_params or {}).get("prompt_token_ids")
    if given is None:
        return None
    if not isinstance(given, list) or not all(type(each) is int for each in given):
        raise invalid("kv_transfer_params", "`kv_transfer_params.prompt_token_ids` must be a list of token ids.")
    return given


def _echoed(conversation: Conversation) -> str:
    """Return the part of the answer that the request contains: the last message if it is the assistant's, else ""."""
    last = conversation.messages[-1]
    return str(last["content"]) if last.get("role") == "assistant" else ""


def _num_top_logprobs(request: ChatRequest) -> int | None:
    number("top_logprobs", request.top_logprobs, low=0, high=MAX_LOGPROBS)
    if not request.logprobs:
        if request.top_logprobs:
            raise RequestRejected("`top_logprobs` needs `logprobs` to be true.", param="top_logprobs")
        return None
    return request.top_logprobs or 0


def template_messages(messages: Sequence[ChatMessage], skipped: set[str]) -> list[dict[str, Any]]:
    """Return messages as templates expect them: text content, and tool arguments as objects.

    Adds the kinds of skipped parts to ``skipped``. Raises RequestRejected.
    """
    return [_template_message(message, f"messages[{i}]", skipped) for i, message in enumerate(messages)]


def _template_message(message: ChatMessage, where: str, skipped: set[str]) -> dict[str, Any]:
    result: dict[str, Any] = msgspec.to_builtins(message)
    is_answer = message.role == "assistant"
    content, reasoning = result.get("content") or "", result.pop("reasoning", None)
    if is_answer and isinstance(content, list):
        thoughts = [reasoning_of(part) for part in content if part["type"] in REASONING]
        reasoning = "\n".join(filter(None, thoughts)) or reasoning
        content = [part for part in content if part["type"] not in REASONING]
    text = text_of(content, f"{where}.content", param="messages", skipped=skipped if is_answer else None)
    refusal, called = result.pop("refusal", None), result.pop("function_call", None)
    result["content"] = text or (refusal if is_answer else None) or ""
    if reasoning is not None:
        result.setdefault("reasoning_content", reasoning)
    # The result of a call in OpenAI's older form.
    if message.role == "function":
        result.update(role="tool", tool_call_id=message.tool_call_id or message.name)
    calls = result.pop("tool_calls", None) or []
    if is_answer and called is not None:
        calls = [*calls, {"id": called.get("name"), "function": called}]
    if calls:
        result["tool_calls"] = [_template_call(call) for call in calls]
    return result


def _template_call(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call as templates expect it. The input of a custom tool becomes its argument ``input``."""
    if isinstance(custom := call.get("custom"), dict):
        function: Any = {"name": custom.get("name"), "arguments": {"input": custom.get("input")}}
    else:
        function = call.get("function")
    if isinstance(function, dict):
        function = {**function, "arguments": arguments_of(function.get("arguments"))}
    return {**{key: value for key, value in call.items() if key != "custom"}, "type": "function", "function": function}
