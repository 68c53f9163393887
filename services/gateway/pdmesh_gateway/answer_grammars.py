"""Structured output: turn ``response_format`` and vLLM's ``structured_outputs`` into a grammar, and check the grammar
before the request is queued.

JSON is compact by default: where blanks are allowed, a model may write them without end.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import msgspec
from llguidance import LLMatcher, StructTag

from pdmesh.errors import RequestRejected
from pdmesh.grammars import MAX_GRAMMAR_BYTES
from pdmesh_gateway.grammar_process import GrammarProcess
from pdmesh_gateway.protocol.sampling_fields import SamplingFields, StructuredOutputs
from pdmesh_gateway.sampling import invalid
from pdmesh_gateway.schemas import ANY_OBJECT, Obeyed

QuestionT = TypeVar("QuestionT")
AnswerT = TypeVar("AnswerT")

#: Limits of a schema: its size and its contents. OpenAI allows 5,000 properties, but compiling so large a schema takes
#: seconds.
MAX_SCHEMA_BYTES = 64 * 1024
MAX_PROPERTIES = 1000
MAX_ENUM_VALUES = 1000
MAX_DEPTH = 64
#: Limit of a schema's lower bounds: lists of a million items compile, and then take seconds a token.
MAX_LEAST = 10_000
_LEAST = ("minItems", "minLength", "minProperties", "minContains")

#: Limit of the time to compile: only schemas that are written to be slow take longer.
COMPILE_LIMIT_S = 2.0

#: Sizes of the caches: verdicts on grammars, and schemas reduced to the part that can be obeyed.
MAX_KEPT = 4096
MAX_KEPT_SCHEMAS = 256

#: Limit of the dropped constraints that one schema's warnings name.
MAX_WARNINGS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerConstraint:
    """Constraint that a request sets on its answer: a ``grammar``, or JSON that fits a ``schema``.

    ``param`` names the request's field. ``text`` is a grammar in GBNF or Lark, not converted yet. ``blanks`` allows
    white space between the parts of JSON; the regular expression ``pattern`` says which.
    """

    param: str
    grammar: str = ""
    text: str = ""
    schema: Any = None
    strict: bool = False
    blanks: bool = False
    pattern: str | None = None


class GrammarChecker:
    """Checker of grammars, which compiles each grammar once, off the event loop.

    The methods of ``judge`` block, so they run on a thread. One compilation runs at a time: hard grammars delay only
    requests with grammars.
    """

    def __init__(self, judge: GrammarProcess) -> None:
        self._judge = judge
        #: Verdicts by the digest of the grammar.
        self._problems: dict[bytes, str | None] = {}
        #: Results by the digest of the schema.
        self._obeyed: dict[bytes, Obeyed] = {}
        self._limiter = anyio.CapacityLimiter(1)

    async def grammar(self, fields: SamplingFields) -> tuple[str, list[str]]:
        """Return the grammar that answers must obey, and warnings of dropped constraints.

        The grammar is empty if the request sets no constraint. Raises RequestRejected, naming the field, if the
        constraint is malformed, cannot be obeyed, or takes too long to check.
        """
        asked = asked_for(fields)
        if asked is None:
            return "", []
        grammar, warnings = await self.grammar_of(asked)
        await self.check(asked.param, grammar)
        return grammar, warnings

    async def grammar_of(self, asked: AnswerConstraint) -> tuple[str, list[str]]:
        """Return the grammar of a constraint, unchecked, and warnings of dropped constraints.

        Raises RequestRejected if it is malformed, takes too long, or is strict and has parts that cannot be obeyed.
        """
        if asked.text:
            return await self._converted(asked.text, asked.param), []
        if asked.schema is None:
            return asked.grammar, []
        found = await self.obeyed(asked.schema, asked.param)
        malformed = [str(each) for each in found.dropped if each.is_malformed]
        if malformed:
            raise invalid(asked.param, f"`{asked.param}` is not a valid JSON schema: {'; '.join(malformed[:4])}.")
        broken = [str(each) for each in found.dropped if not each.is_annotation]
        if asked.strict and broken:
            raise invalid(asked.param, f"The strict `{asked.param}` cannot be enforced: {'; '.join(broken[:4])}.")
        grammar = json_grammar(found.schema, asked.param, blanks=asked.blanks, pattern=asked.pattern)
        return grammar, [f"`{asked.param}` is not checked against {each}" for each in found.dropped[:MAX_WARNINGS]]

    async def obeyed(self, schema: Any, param: str) -> Obeyed:
        """Return the part of a schema that can be obeyed. Raises RequestRejected if that takes too long."""
        text = json.dumps(schema)
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass")).digest()
        found = self._obeyed.get(digest)
        if found is None:
            found = self._obeyed[digest] = await self._answer(self._judge.obeyed, schema, param)
            if len(self._obeyed) > MAX_KEPT_SCHEMAS:
                del self._obeyed[next(iter(self._obeyed))]
        return found

    async def _converted(self, text: str, param: str) -> str:
        """Return a grammar from GBNF or Lark. Raise RequestRejected if it cannot be read."""
        found = await self._answer(self._judge.converted, text, param)
        if found.problem:
            raise invalid(param, f"`{param}.grammar` is not a valid grammar: {found.problem}")
        return found.grammar

    async def _answer(self, ask: Callable[[QuestionT], AnswerT | None], question: QuestionT, param: str) -> AnswerT:
        """Return the judge's answer. Raises RequestRejected if it takes too long."""
        async with self._limiter:
            await anyio.to_thread.run_sync(self._judge.prepare)
            answer: AnswerT | None = None
            with anyio.move_on_after(COMPILE_LIMIT_S):
                answer = await anyio.to_thread.run_sync(ask, question, abandon_on_cancel=True)
            if answer is None:
                self._judge.give_up()
                raise invalid(param, f"`{param}` takes longer than {COMPILE_LIMIT_S:g} s to compile. Simplify it.")
            return answer

    async def check(self, param: str, grammar: str) -> None:
        """Raise RequestRejected naming ``param`` if a grammar cannot be obeyed."""
        if (problem := await self.problem(grammar)) is not None:
            raise invalid(param, f"`{param}` {problem}")

    async def problem(self, grammar: str) -> str | None:
        """Return why a grammar cannot be obeyed, worded to follow the field's name; None if it can be."""
        if len(grammar) > MAX_GRAMMAR_BYTES:
            return f"compiles to a grammar of more than {MAX_GRAMMAR_BYTES} bytes. Simplify it."
        digest = hashlib.blake2b(grammar.encode("utf-8", "surrogatepass")).digest()
        if digest in self._problems:
            return self._problems[digest]
        async with self._limiter:
            await anyio.to_thread.run_sync(self._judge.prepare)
            with anyio.move_on_after(COMPILE_LIMIT_S):
                problem = await anyio.to_thread.run_sync(self._judge.problem, grammar, abandon_on_cancel=True)
                self._keep(digest, None if problem is None else f"cannot be enforced: {problem}")
                return self._problems[digest]
            self._judge.give_up()
        # Not cached: on a busy machine the same grammar may compile in time at the next request.
        return f"takes longer than {COMPILE_LIMIT_S:g} s to compile. Simplify it."

    def _keep(self, digest: bytes, problem: str | None) -> None:
        self._problems[digest] = problem
        if len(self._problems) > MAX_KEPT:
            del self._problems[next(iter(self._problems))]


def asked_for(fields: SamplingFields) -> AnswerConstraint | None:
    """Return the constraint that a request sets on its answer; None without one.

    Raise RequestRejected for several constraints, or one that is malformed, too large or of an unknown type.
    """
    options, wanted = fields.structured_outputs, fields.response_format
    if options is not None and (asked := _of_options(options)) is not None:
        if wanted is not None and wanted.type != "text":
            raise invalid("structured_outputs", "`structured_outputs` and `response_format` cannot both be given.")
        return asked
    if wanted is None or wanted.type == "text":
        return None
    name = wanted.FIELD
    given = wanted.schema if wanted.json_schema is None else wanted.json_schema.schema
    strict = wanted.json_schema is not None and wanted.json_schema.strict is True
    if wanted.type == "json_object":
        return AnswerConstraint(
            param=name, schema=ANY_OBJECT if given in (None, {}) else read_schema(given, name), strict=strict
        )
    if wanted.type == "json_schema":
        if given is None:
            raise invalid(name, f"`{wanted.SCHEMA}` is missing.")
        return AnswerConstraint(param=name, schema=read_schema(given, name), strict=strict)
    if wanted.type == "structural_tag":
        return AnswerConstraint(param=name, grammar=_structural_tag(msgspec.to_builtins(wanted), name))
    raise invalid(name, f"`{name}.type` is {wanted.type[:40]!r}: use text, json_object, json_schema or structural_tag.")


def read_schema(schema: Any, param: str) -> Any:
    """Return a schema that is given as an object or as JSON text.

    Raises RequestRejected if it is too large or unreadable.
    """
    if isinstance(schema, str):
        if len(schema) > MAX_SCHEMA_BYTES:
            raise _too_large(param)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise invalid(param, f"`{param}` has a schema that is not JSON: {error}") from None
    if not isinstance(schema, Mapping | bool):
        raise invalid(param, f"`{param}` has a schema that is not a JSON object.")
    check_size(schema, param)
    return schema


def json_grammar(schema: Any, param: str, *, blanks: bool = False, pattern: str | None = None) -> str:
    """Return the grammar of JSON that fits a schema. Raises RequestRejected if llguidance cannot read the schema.

    The JSON is compact unless ``blanks`` is set, or ``pattern``, the regular expression of white space between its
    parts.
    """
    try:
        if pattern is not None:
            return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_pattern": pattern})
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_flexible": blanks})
    except ValueError as error:
        raise invalid(param, f"`{param}` has a schema that cannot be read: {error}") from None


def _of_options(options: StructuredOutputs) -> AnswerConstraint | None:
    name = "structured_outputs"
    given = [each for each in options.KINDS if getattr(options, each) not in (None, False)]
    if not given:
        return None
    if len(given) > 1:
        raise invalid(name, f"`{name}` has {' and '.join(given)}: give one of them.")
    blanks, pattern = options.disable_any_whitespace is False, options.whitespace_pattern
    if options.json is not None or options.json_object:
        schema = ANY_OBJECT if options.json is None else read_schema(options.json, f"{name}.json")
        return AnswerConstraint(param=name, schema=schema, blanks=blanks, pattern=pattern)
    if options.regex is not None:
        return AnswerConstraint(param=name, grammar=LLMatcher.grammar_from_regex(options.regex))
    if options.choice is not None:
        return AnswerConstraint(param=name, grammar=_choice(options.choice, name))
    if options.grammar is not None:
        if not 0 < len(options.grammar) <= MAX_GRAMMAR_BYTES:
            raise invalid(name, f"`{name}.grammar` must have 1 to {MAX_GRAMMAR_BYTES} characters.")
        return AnswerConstraint(param=name, text=options.grammar)
    return AnswerConstraint(param=name, grammar=_structural_tag(options.structural_tag, name))


def _choice(choices: Sequence[str], param: str) -> str:
    if not choices or "" in choices:
        raise invalid(param, f"`{param}.choice` must be one or more strings, none of them empty.")
    if len(choices) > MAX_ENUM_VALUES:
        raise invalid(param, f"`{param}.choice` has {len(choices)} strings; at most {MAX_ENUM_VALUES} are allowed.")
    return LLMatcher.grammar_from_regex("|".join(re.escape(choice) for choice in choices))


def _structural_tag(given: Any, param: str) -> str:
    """Return the grammar of text with tagged parts.

    ``given`` has vLLM's first form, as an object or JSON text: ``structures`` of begin, schema and end, and
    ``triggers``. Each begin must start with a trigger. Raise RequestRejected, which names ``param``, if ``given`` is
    malformed, too large or without structures.
    """
    try:
        tag = msgspec.convert(json.loads(given) if isinstance(given, str) else given, _StructuralTag, strict=False)
    except (msgspec.ValidationError, ValueError, RecursionError) as error:
        raise invalid(param, f"`{param}` has a structural tag that cannot be read: {error}") from None
    if max(len(tag.structures), len(tag.triggers)) > MAX_ENUM_VALUES:
        raise invalid(param, f"`{param}` has more than {MAX_ENUM_VALUES} tags or triggers.")
    tags: list[StructTag] = []
    for structure in tag.structures:
        trigger = next((each for each in tag.triggers if each and structure.begin.startswith(each)), None)
        if trigger is None:
            raise invalid(param, f"`{param}` has a tag {structure.begin[:40]!r} that begins with none of the triggers.")
        check_size(structure.schema, param)
        schema = json.dumps(structure.schema)
        tags.append(StructTag(trigger=trigger, begin=structure.begin, grammar=schema, end=structure.end))
    if not tags:
        raise invalid(param, f"`{param}` has no tags.")
    return LLMatcher.grammar_from_lark(StructTag.to_grammar(tags, assume_special=False))


class _Structure(msgspec.Struct):
    begin: str
    schema: Any
    end: str = ""


class _StructuralTag(msgspec.Struct):
    structures: list[_Structure]
    triggers: list[str]


def check_size(schema: Any, param: str) -> None:
    """Raise RequestRejected for a schema that is too large or nested too deep."""
    num_properties = num_values = 0
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for value in level:
            if isinstance(value, Mapping):
                properties, values = value.get("properties"), value.get("enum")
                num_properties += len(properties) if isinstance(properties, Mapping) else 0
                num_values += len(values) if isinstance(values, Sequence) else 0
                for name in _LEAST:
                    least = value.get(name)
                    if isinstance(least, int | float) and least > MAX_LEAST:
                        raise invalid(param, f"`{param}` has a schema whose `{name}` is over {MAX_LEAST}.")
                below += value.values()
            elif isinstance(value, list):
                below += value
        if num_properties > MAX_PROPERTIES:
            raise invalid(param, f"`{param}` has a schema of over {MAX_PROPERTIES} properties.")
        if num_values > MAX_ENUM_VALUES:
            raise invalid(param, f"`{param}` has a schema of over {MAX_ENUM_VALUES} enum values.")
        if not below:
            break
        level = below
    else:
        raise invalid(param, f"`{param}` has a schema that is more than {MAX_DEPTH} levels deep.")
    if len(json.dumps(schema)) > MAX_SCHEMA_BYTES:
        raise _too_large(param)


def _too_large(param: str) -> RequestRejected:
    return invalid(param, f"`{param}` has a schema of over {MAX_SCHEMA_BYTES} bytes.")
