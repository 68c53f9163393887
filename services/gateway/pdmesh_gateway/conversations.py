r"""Conversations of every dialect: turn messages and tools into a prompt, and the answer into items.

An endpoint makes a `Conversation` and `SamplingFields` of its dialect's request, `prepare`\\ s them, and renders the
item events of the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio.to_thread

from pdmesh_gateway.answer_format import AnswerFormat, Calls
from pdmesh_gateway.answer_grammars import AnswerConstraint, asked_for
from pdmesh_gateway.items import ChoiceItems, ItemParser, ItemWriter
from pdmesh_gateway.jobs import GenerationJob
from pdmesh_gateway.protocol.sampling_fields import SamplingFields
from pdmesh_gateway.reasoning import ReasoningStart
from pdmesh_gateway.sampling import Truncation, invalid
from pdmesh_gateway.serving import Serving
from pdmesh_gateway.tools.format import ToolFormat
from pdmesh_gateway.tools.tool_choice import Tool, ToolChoice, calls_of, check_tools, with_any_arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A dialect's request in the form that all dialects share.

    ``messages`` are as templates expect them: content is text, and a call's arguments are an object. ``template`` is
    the client's own template, and ``variables`` are further variables for it. ``token_ids`` is the prompt if the client
    sends tokens; then nothing is rendered. ``add_special_tokens`` is off because templates write special tokens
    themselves. ``warnings`` are sent along with the answer.
    """

    messages: list[dict[str, Any]]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    max_reasoning_tokens: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    template: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict[str, Any])
    truncation: Truncation | None = None
    token_ids: Sequence[int] | None = None
    warnings: tuple[str, ...] = ()

    @property
    def shown_tools(self) -> tuple[Tool, ...]:
        """The tools that the prompt lists: all tools, also if a choice of tool excludes some; none if no tool may be
        called.
        """
        return self.tools if self.tool_choice.mode != "none" else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A conversation ready to be answered. ``warnings`` name the constraints that answers cannot be held to."""

    prompt: Sequence[int]
    grammar: str = ""
    warnings: tuple[str, ...] = ()
    answer_format: AnswerFormat
    reasoning: ReasoningStart = ReasoningStart.NONE
    calls: Calls | None = None
    include_reasoning: bool = True

    @property
    def shown_ids(self) -> frozenset[int]:
        """Special tokens that are part of the text that `answer` reads."""
        return self.answer_format.shown_ids(self.reasoning, self.calls)

    @property
    def call_parser(self) -> Callable[[ItemWriter], ItemParser] | None:
        """The parser of an answer that may call tools; None if it may not."""
        return None if self.calls is None else self._parser

    def _parser(self, writer: ItemWriter) -> ItemParser:
        return self.answer_format.parser(writer, self.reasoning, self.calls)

    def answer(self, job: GenerationJob, index: int) -> ChoiceItems:
        """Return the converter of one choice's deltas into items."""
        return ChoiceItems(
            self._parser, ItemWriter(f"{job.request_id}-{index}", shows_reasoning=self.include_reasoning)
        )


async def prompt_of(serving: Serving, conversation: Conversation) -> list[int]:
    """Return a conversation's token ids, perhaps too many. Raises RequestRejected if it is invalid or far too long."""
    _, token_ids = await _rendered(serving, conversation)
    return token_ids


async def _rendered(serving: Serving, conversation: Conversation) -> tuple[str, list[int]]:
    """Return a conversation as text and as token ids. Raise RequestRejected for invalid tools or messages.

    Tools are checked on a thread, because they may be as large as the body of a request.
    """
    if conversation.tools:
        await anyio.to_thread.run_sync(check_tools, conversation.tools, conversation.tool_choice)
    else:
        check_tools((), conversation.tool_choice)
    tools, answer_format = conversation.shown_tools, serving.answer_format
    if conversation.token_ids is not None:
        token_ids = list(serving.check_prompt(conversation.token_ids, what="messages"))
        return await serving.tokenizer.decode(token_ids, skip_special_tokens=False), token_ids
    text = await serving.tokenizer.render_chat(
        _for_template(conversation, answer_format.tools),
        add_generation_prompt=conversation.add_generation_prompt,
        continue_final_message=conversation.continue_final_message,
        template=conversation.template,
        variables=conversation.variables,
        tools=[tool.for_template() for tool in tools],
        tool_format=answer_format.tools.name,
        tells_tools=answer_format.tells_tools,
    )
    return text, await serving.encode(text, add_special_tokens=conversation.add_special_tokens, what="messages")


async def prepare(serving: Serving, conversation: Conversation, fields: SamplingFields) -> Prepared:
    """Return the prompt and the grammar of the answers, from tools and ``fields``. Raises RequestRejected.

    If the tools' schemas make a grammar that cannot be obeyed, their arguments may be any objects, with a warning;
    strict tools and a constraint of the request's own are rejected instead.
    """
    text, token_ids = await _rendered(serving, conversation)
    prompt = serving.check_prompt(token_ids, what="messages", truncation=conversation.truncation)
    answer_format, checker = serving.answer_format, serving.grammars
    reasoning = ReasoningStart.NONE
    if not conversation.continue_final_message:
        reasoning = answer_format.reasoning_after(text)
    calls: Calls | None = None
    warnings = list(conversation.warnings)
    if conversation.shown_tools:
        calls, problems = await calls_of(
            conversation.tools,
            conversation.tool_choice,
            checker,
            most=answer_format.max_calls if conversation.parallel_tool_calls else 1,
        )
        warnings += problems
    budget = conversation.max_reasoning_tokens
    if budget is not None and not answer_format.limits_reasoning:
        raise invalid("thinking_token_budget", "This model's reasoning cannot be limited: no single token ends it.")
    if budget is not None and reasoning is ReasoningStart.BEGUN:
        budget = max(0, budget - answer_format.num_thought_tokens(prompt))
    asked = asked_for(fields) or AnswerConstraint(param="tools" if calls is not None else "thinking_token_budget")
    param = asked.param
    given, problems = await checker.grammar_of(asked)
    warnings += problems
    if calls is None:
        grammar = answer_format.grammar(reasoning, calls, given, budget)
    else:
        grammar = await anyio.to_thread.run_sync(answer_format.grammar, reasoning, calls, given, budget)
    if grammar and calls is not None and (problem := await checker.problem(grammar)) is not None:
        if given or any(tool.strict for tool in conversation.tools):
            raise invalid(param, f"`{param}` {problem}")
        warnings.append(f"`tools` {problem} Arguments may be any object.")
        calls = with_any_arguments(calls)
        grammar = answer_format.grammar(reasoning, calls, given, budget)
    if grammar:
        await checker.check(param, grammar)
    return Prepared(
        prompt=prompt,
        grammar=grammar,
        warnings=tuple(warnings),
        answer_format=answer_format,
        reasoning=reasoning,
        calls=calls,
        include_reasoning=conversation.include_reasoning,
    )


def _for_template(conversation: Conversation, tools: ToolFormat) -> list[dict[str, Any]]:
    """Return messages with call ids in the form that the model's templates accept, and with the tool's name at each
    result.
    """
    # Names of called tools by call id.
    names: dict[str, str] = {}

    def adapted(message: dict[str, Any]) -> dict[str, Any]:
        changes: dict[str, Any] = {}
        if isinstance(call_id := message.get("tool_call_id"), str):
            changes["tool_call_id"] = tools.template_call_id(call_id)
            if message.get("name") is None and call_id in names:
                changes["name"] = names[call_id]
        if calls := message.get("tool_calls"):
            names.update({str(call.get("id")): name for call in calls if (name := _name_of(call)) is not None})
            changes["tool_calls"] = [{**call, "id": tools.template_call_id(str(call.get("id", "")))} for call in calls]
        return {**message, **changes} if changes else message

    return [adapted(message) for message in conversation.messages]


def _name_of(call: Mapping[str, Any]) -> str | None:
    function = call.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None
