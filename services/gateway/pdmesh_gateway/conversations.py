"""Conversations, whichever dialect they came in: from messages and tools to a prompt, and to the items of its answer.

An endpoint makes a `Conversation` and `SamplingFields` of its dialect's request, `prepare`\\ s it, and renders the item
events of the answers that follow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pdmesh_gateway.items import ChoiceItems
from pdmesh_gateway.jobs import GenerationJob
from pdmesh_gateway.protocol import SamplingFields
from pdmesh_gateway.serving import Serving


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that an answer may call. Its arguments are an object that fits ``parameters``, a JSON schema."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])
    strict: bool = False  # a schema that cannot be obeyed is an error, not a warning


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Whether an answer calls tools, and which ones it may."""

    mode: Literal["none", "auto", "required"] = "auto"
    allowed: tuple[str, ...] | None = None  # names; None: all
    is_named: bool = False  # required, one call of the only one allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What a dialect's request comes to."""

    messages: list[dict[str, Any]]  # as templates know them: content is text, a call's arguments are an object
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False  # templates write them themselves
    template: str | None = None  # the client's own
    variables: Mapping[str, Any] = field(default_factory=dict[str, Any])  # further ones for the template
    truncate: int | None = None  # to so many tokens, on the left


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A conversation ready to be answered."""

    prompt: Sequence[int]
    grammar: str = ""
    shown_ids: frozenset[int] = frozenset()  # special tokens that are part of the text that `answers` read
    warnings: tuple[str, ...] = ()  # what of it cannot be held to

    def answers(self, job: GenerationJob) -> list[ChoiceItems]:
        """Return what turns the deltas of each of the job's choices into items."""
        return [ChoiceItems() for _ in range(job.num_choices)]


async def prompt_of(serving: Serving, conversation: Conversation) -> list[int]:
    """Return a conversation as token ids, of any number. Raises RequestRejected."""
    text = await serving.tokenizer.render_chat(
        conversation.messages,
        add_generation_prompt=conversation.add_generation_prompt,
        continue_final_message=conversation.continue_final_message,
        template=conversation.template,
        variables=conversation.variables,
    )
    return await serving.encode(text, add_special_tokens=conversation.add_special_tokens, what="messages")


async def prepare(serving: Serving, conversation: Conversation, fields: SamplingFields) -> Prepared:
    """Return the prompt, and what answers are held to, by tools and by ``fields``. Raises RequestRejected."""
    token_ids = await prompt_of(serving, conversation)
    prompt = serving.check_prompt(token_ids, what="messages", truncate=conversation.truncate)
    return Prepared(prompt=prompt, grammar=await serving.grammars.grammar(fields))
