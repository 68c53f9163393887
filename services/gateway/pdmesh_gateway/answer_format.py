"""How the served model writes its answers: whether it reasons, and how it calls tools.

Found once, at start, from the checkpoint's chat template and vocabulary. From it come the grammar that an answer is
held to and the parser that reads it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdmesh.errors import ConfigError
from pdmesh_gateway.items import ItemParser, ItemWriter, PlainText
from pdmesh_gateway.model_tokenizer import ModelTokenizer
from pdmesh_gateway.reasoning import THINK, ReasoningMarkers, ReasoningStart, markers_of
from pdmesh_gateway.tools.answer_reader import Reader, Script, ScriptParser
from pdmesh_gateway.tools.format import MAX_CALLS, CallableTool, ToolFormat, regex
from pdmesh_gateway.tools.harmony_calls import ANALYSIS, CHANNEL, FINAL, MESSAGE, Harmony
from pdmesh_gateway.tools.hermes_calls import Hermes
from pdmesh_gateway.tools.llama_calls import Llama
from pdmesh_gateway.tools.mistral_calls import Mistral
from pdmesh_gateway.tools.qwen_coder_calls import QwenCoder

_FORMATS: tuple[ToolFormat, ...] = (Hermes(), Llama(), Mistral(by_name=True), Mistral(by_name=False), QwenCoder())
FORMATS: Mapping[str, ToolFormat] = {each.name: each for each in _FORMATS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Tools that an answer may call: at most ``most`` calls, and at least one if ``required``."""

    tools: tuple[CallableTool, ...]
    required: bool
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """Format of a model's answers: reasoning, text and calls of tools.

    ``tells_tools``: the system message lists the tools and explains how to call them. This is needed if the template
    shows none, or if the model's way of calling them is unknown.

    ``reasoning``: markers of reasoning, used if the model ``reasons``. ``channels``: parser of answers that are
    messages of several channels, None for other models. ``max_calls``: limit of calls in one answer. ``textless_ids``:
    ids of the tokens that are no text to a grammar, by the text of each token.
    """

    tools: ToolFormat = Hermes()  # noqa: RUF009 (has no state)
    tells_tools: bool = False
    reasons: bool = False
    reasoning: ReasoningMarkers = THINK
    channels: Harmony | None = None
    max_calls: int = MAX_CALLS
    textless_ids: Mapping[str, int]

    def reasoning_after(self, prompt: str) -> ReasoningStart:
        """Return how the answer to a prompt, given as text, begins; NONE if the model does not reason."""
        return self.reasoning.begins_after(prompt) if self.reasons else ReasoningStart.NONE

    def shown_ids(self, begins: ReasoningStart, calls: Calls | None) -> frozenset[int]:
        """Return the special tokens whose text is needed to read an answer. Without ``calls``, no calls are read."""
        markers = self.tools.markers if calls is not None or self.channels else ()
        if begins is not ReasoningStart.NONE:
            markers += (self.reasoning.open, self.reasoning.close)
        return frozenset(self.textless_ids[marker] for marker in markers if marker in self.textless_ids)

    def parser(self, writer: ItemWriter, begins: ReasoningStart, calls: Calls | None) -> ItemParser:
        """Return a parser of one answer that reports its items to ``writer``. Without ``calls``, no calls are read."""
        if begins is ReasoningStart.NONE and calls is None:
            return PlainText(writer)
        schemas = {tool.name: tool.schema for tool in calls.tools} if calls is not None else {}

        def read(reader: Reader) -> Script[None]:
            if self.channels is not None:
                yield from self.channels.read_messages(reader, schemas, thinks=begins is ReasoningStart.BEGUN)
                return
            yield from self.reasoning.read(reader, begins)
            if calls is not None:
                yield from self.tools.read(reader, schemas)
            yield from reader.rest()

        return ScriptParser(read, writer)

    @property
    def limits_reasoning(self) -> bool:
        """Whether `grammar` can limit reasoning: its end must be a token."""
        return self.reasons and self.reasoning.close in self.textless_ids

    def num_thought_tokens(self, prompt: Sequence[int]) -> int:
        """Return the number of prompt tokens after the last marker that opens reasoning; 0 without one."""
        opens = self.textless_ids.get(self.reasoning.open)
        return next((number for number, token_id in enumerate(reversed(prompt)) if token_id == opens), 0)

    def grammar(
        self, begins: ReasoningStart, calls: Calls | None, given: str, max_reasoning_tokens: int | None = None
    ) -> str:
        """Return the grammar that an answer must obey; empty if any text will do.

        An answer makes calls, obeys ``given`` or, without ``given``, is any text. If calls are required, it makes
        calls. Reasoning ends after ``max_reasoning_tokens`` if this is not None.
        """
        if calls is None and (begins is ReasoningStart.NONE or not (given or max_reasoning_tokens is not None)):
            return given
        given = "" if calls is not None and calls.required else given
        rules: list[str] = []
        answers: list[str] = []
        if calls is not None:
            free = not calls.required and not given
            rules.append(self.tools.rules(calls.tools, self._marker, most=calls.most, free=free))
            answers.append("answer")
        head = f"{self._marker(FINAL)} " if self.channels is not None else ""
        if given:
            answers.append(f"{head}@given")
        if not answers:
            answers.append(f"{head}TEXT")
        think, text = self._reasoning_rules(begins)
        lark = f"start: {think}({' | '.join(answers)})\nTEXT: {text}\n" + "\n".join(
            [*rules, *self._think_rules(begins, max_reasoning_tokens)]
        )
        grammars: list[dict[str, Any]] = [{"name": "answer", "lark_grammar": lark}]
        if given:
            first, *others = _grammars_of(given)
            grammars += [{**first, "name": "given"}, *others]
        return json.dumps({"grammars": grammars})

    def _marker(self, text: str) -> str:
        """Return a Lark expression that matches exactly ``text``, with special tokens by id."""
        parts = [text] if text in self.textless_ids else [part for part in _TOKENS.split(text) if part]
        return " ".join(
            f"<[{self.textless_ids[part]}]>" if part in self.textless_ids else json.dumps(part) for part in parts
        )

    def _reasoning_rules(self, begins: ReasoningStart) -> tuple[str, str]:
        """Return the Lark expression that begins an answer, and the regular expression of the text proper."""
        if begins is ReasoningStart.NONE:
            return "", "/(?s:.*)/"
        if begins is ReasoningStart.BEGUN:
            return "think ", "/(?s:.*)/"
        # Text that begins with the marker of reasoning would be read as reasoning.
        return "think? ", f"/(?s:.*)/ & ~/(?s:\\s*{regex(self.reasoning.open)}.*)/"

    def _think_rules(self, begins: ReasoningStart, max_tokens: int | None) -> list[str]:
        if begins is ReasoningStart.NONE:
            return []
        opened = f"/\\s{{0,4}}/ {self._marker(self.reasoning.open)} " if begins is ReasoningStart.POSSIBLE else ""
        close = self._marker(self.reasoning.close)
        resumes = self._marker(self.reasoning.resumes)
        if self.limits_reasoning and max_tokens is not None:
            if max_tokens == 0:
                return [f"think: {opened}{close} BLANKS", _BLANKS]
            thought = f"thought[max_tokens={max_tokens}]: /(?s:.*)/"
            return [f"think: {opened}thought {close} BLANKS {resumes}", thought, _BLANKS]
        if self.reasoning.close in self.textless_ids:
            return [f"think: {opened}/(?s:.*)/ {close} BLANKS {resumes}", _BLANKS]
        return [f"think: {opened}thought BLANKS {resumes}", f"thought[lazy]: /(?s:.*)/ {close}", _BLANKS]


#: Special tokens of gpt-oss's kind within a marker.
_TOKENS = re.compile(r"(<\|\w+\|>)")

#: Blanks after reasoning: bounded, because a model may write them without end.
_BLANKS = r"BLANKS: /\s{0,4}/"


def _grammars_of(grammar: str) -> list[dict[str, Any]]:
    """Return the parts of a grammar of llguidance; the first part holds the start rule."""
    if not grammar.lstrip().startswith("{"):
        return [{"lark_grammar": grammar}]
    parts: list[dict[str, Any]] = json.loads(grammar)["grammars"]
    return parts


def find_format(tokenizer: ModelTokenizer, setting: str) -> AnswerFormat:
    """Return the format of a checkpoint's answers.

    ``setting`` names the format of calls; if it is empty, the template and the vocabulary decide. Raise ConfigError for
    an unknown format.
    """
    if setting and setting not in FORMATS:
        raise ConfigError(f"gateway.tool_format is {setting!r}: use one of {', '.join(FORMATS)}")
    template, source, vocabulary = tokenizer.tool_template, tokenizer.tool_template_source, tokenizer.added_tokens
    shows_tools = template is not None and template.tools
    if not setting and {CHANNEL, MESSAGE} <= vocabulary:
        channels = Harmony()
        return AnswerFormat(
            tools=channels,
            channels=channels,
            tells_tools=not shows_tools,
            max_calls=1,
            reasons=True,
            reasoning=ANALYSIS,
            textless_ids=tokenizer.textless_ids,
        )
    markers = markers_of(source, vocabulary)
    tools = FORMATS[setting] if setting else _detected(source, vocabulary)
    has_one_call = template is not None and shows_tools and template.calls and not template.several_calls
    return AnswerFormat(
        tools=tools or FORMATS["hermes"],
        tells_tools=not shows_tools or tools is None,
        max_calls=1 if has_one_call else MAX_CALLS,
        reasons=markers is not None,
        reasoning=markers or THINK,
        textless_ids=tokenizer.textless_ids,
    )


def _detected(template: str, vocabulary: Sequence[str] | frozenset[str]) -> ToolFormat | None:
    if "<function=" in template:
        return FORMATS["qwen_coder"]
    if "<tool_call>" in template:
        return FORMATS["hermes"]
    if "[TOOL_CALLS]" in vocabulary:
        return FORMATS["mistral" if "[ARGS]" in vocabulary else "mistral_list"]
    if "<|python_tag|>" in vocabulary:
        return FORMATS["llama"]
    return None
