"""Unknown fields of requests: the rules by which they are ignored or refused.

Clients of OpenAI and of other servers add fields every month. Most are bookkeeping and do not affect the answer. A
field that would change the answer or its shape is refused by name. Request types mark such fields
(`pdmesh_gateway.protocol.fields`), so that an endpoint refuses the fields of another endpoint. `OTHERS` lists fields of
other servers. The same rules hold for objects within a request.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec

from pdmesh.errors import RequestRejected
from pdmesh_gateway.http.messages import messages_protocol as messages
from pdmesh_gateway.http.messages.messages_protocol import (
    CountTokensRequest,
    MessagesRequest,
    OutputFormat,
    Thinking,
    ToolDefinition,
)
from pdmesh_gateway.http.responses import responses_protocol as responses
from pdmesh_gateway.http.responses.responses_protocol import (
    FunctionTool,
    InputTokensRequest,
    Reasoning,
    ResponsesRequest,
    TextFormat,
)
from pdmesh_gateway.protocol.chat_protocol import ChatMessage, ChatRequest, FunctionDefinition
from pdmesh_gateway.protocol.completions_protocol import CompletionRequest
from pdmesh_gateway.protocol.embeddings_protocol import EmbeddingRequest
from pdmesh_gateway.protocol.sampling_fields import ResponseFormat, StructuredOutputs
from pdmesh_gateway.protocol.tokens_protocol import DetokenizeRequest, TokenizeRequest

StructType = type[msgspec.Struct]

#: The response header that names the ignored fields.
HEADER = b"x-ignored-fields"
MAX_NAMED = 16

#: Limit of unknown fields: no new version of a client adds more.
MAX_UNKNOWN = 64

_PRINTABLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")

#: Requests without a generated answer. Fields that only affect generation cannot change their results.
_READING: tuple[StructType, ...] = (
    EmbeddingRequest,
    TokenizeRequest,
    DetokenizeRequest,
    CountTokensRequest,
    InputTokensRequest,
)
_GENERATING: tuple[StructType, ...] = (
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
    MessagesRequest,
)

#: Objects within requests that mean the same in several dialects.
_FORMATS: tuple[StructType, ...] = (ResponseFormat, TextFormat, OutputFormat, StructuredOutputs)
_FUNCTIONS: tuple[StructType, ...] = (FunctionDefinition, FunctionTool, ToolDefinition)

#: Names of the same thing. A refusal suggests the first name that the endpoint knows.
_SYNONYMS: tuple[tuple[str, ...], ...] = (
    ("max_tokens", "max_output_tokens", "max_completion_tokens"),
    ("max_tokens", "max_output_tokens", "max_length", "max_new_tokens", "n_predict", "num_predict"),
    ("response_format", "text", "output_config", "output_format"),
    ("structured_outputs", "text", "output_config", "ebnf", "format", "grammar", "grammar_string", "guideline"),
    ("structured_outputs", "text", "output_config", "guided_choice", "guided_grammar", "guided_json", "guided_regex"),
    ("structured_outputs", "text", "output_config", "json_schema", "regex", "response_schema", "structural_tag"),
    ("chat_template_kwargs", "thinking", "enable_thinking", "think", "thinking_budget"),
    ("reasoning_effort", "reasoning", "output_config"),
    ("stop", "stop_sequences", "stopping_strings"),
    ("min_tokens", "min_length", "min_new_tokens"),
    ("repetition_penalty", "repeat_penalty"),
    ("tools", "functions"),
    ("tool_choice", "function_call"),
    ("messages", "prompt", "input"),
    ("system", "instructions", "system_prompt"),
)
_SYNONYMS_WITHIN = (("parameters", "input_schema"), ("schema", "json", "json_schema"))

#: Fields that change an answer and that no request type here has, by their neutral values. They come from OpenAI, vLLM,
#: SGLang, llama.cpp, Ollama, TGI and similar servers.
_OF_OTHER_SERVERS: tuple[tuple[tuple[Any, ...], str], ...] = (
    (
        (),
        "adapter_id audio conversation custom_logit_processor ebnf embedding_bias enable_thinking guided_choice "
        "guided_grammar guided_json guided_regex guideline input_ids json_schema lora_path max_length max_new_tokens "
        "prediction prompt_embeds regex repetition_detection response_schema samplers session_params structural_tag "
        "think thinking_budget truncate web_search_options",
    ),
    (([],), "banned_strings functions logits_processors lora stopping_strings"),
    (("",), "custom_token_bans format grammar grammar_string negative_prompt suffix system_prompt"),
    (
        (False,),
        "ban_eos_token decoder_input_details no_stop_trim raw return_full_text return_hidden_states use_beam_search "
        "watermark",
    ),
    ((True,), "do_sample separate_reasoning stream_reasoning"),
    (
        (0,),
        "dry_multiplier dynatemp_range epsilon_cutoff eta_cutoff min_length min_new_tokens mirostat n_probs "
        "no_repeat_ngram_size penalty_alpha smoothing_factor top_a xtc_probability",
    ),
    ((1,), "guidance_scale num_beams num_return_sequences repeat_penalty tfs tfs_z typical typical_p"),
    ((-1,), "n_predict num_predict"),
    ((-1, 0), "top_n_sigma"),
    (([], ""), "stop_regex"),
    (({},), "options"),
    ((["text"],), "modalities"),
    (("none", "auto"), "function_call"),
)
OTHERS: dict[str, tuple[Any, ...]] = {name: nothing for nothing, names in _OF_OTHER_SERVERS for name in names.split()}

#: The same for messages and other objects within a request.
_OTHERS_OF_MESSAGES: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": (),
    "images": ([],),
    "partial": (False,),
    "prefix": (False,),
}
_OTHERS_OF_FORMATS: dict[str, tuple[Any, ...]] = {"ebnf": (), "pattern": (), "value": ()}
_OTHERS_OF_REASONING: dict[str, tuple[Any, ...]] = {"enabled": (True,), "exclude": (False,), "max_tokens": ()}
_OTHERS_WITHIN: dict[StructType, dict[str, tuple[Any, ...]]] = {
    ChatMessage: _OTHERS_OF_MESSAGES,
    messages.InputMessage: _OTHERS_OF_MESSAGES,
    responses.InputItem: _OTHERS_OF_MESSAGES,
    Reasoning: _OTHERS_OF_REASONING,
    Thinking: _OTHERS_OF_REASONING,
    ResponseFormat: _OTHERS_OF_FORMATS,
    TextFormat: _OTHERS_OF_FORMATS,
    OutputFormat: _OTHERS_OF_FORMATS,
}


def known_fields(fields: Mapping[str, Any], kind: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the fields that ``kind`` has, and the names of the ignored fields, at any depth.

    Whole numbers written as floats become integers where ``kind`` has integers. Raises RequestRejected for a field that
    would change the answer, or that looks like a misspelt one.
    """
    reading = _Reading()
    known = reading.object(fields, kind)
    return known, tuple(reading.ignored)


def ignored_in_objects(request: Any) -> tuple[str, ...]:
    """Check the objects of plain type (`pdmesh_gateway.protocol.fields.shaped`) as `known_fields` does.

    Return the names of the ignored fields. Raises RequestRejected.
    """
    names: tuple[str, ...] = ()
    kind: Any = type(request)
    for name, shape in _shapes_of(kind):
        if objects := getattr(request, name):
            reading = _Reading(path=[name])
            reading.value(objects, _Plan(item=_Plan(struct=shape)))
            names += tuple(reading.ignored)
    return names


def header_value(names: Iterable[str]) -> bytes:
    """Return names for `HEADER`; names beyond `MAX_NAMED`, or that a header cannot hold, are only counted."""
    every = list(names)
    shown = [name for name in every[:MAX_NAMED] if _PRINTABLE.fullmatch(name)]
    rest = [f"{len(every) - len(shown)} more"] if len(shown) < len(every) else []
    return ", ".join(shown + rest).encode()


def unrecognized(name: str, hint: str = "") -> RequestRejected:
    """Return the error of an unknown field in OpenAI's words, with an optional hint."""
    name = name[:100]
    message = f"Unrecognized request argument supplied: {name}{'.' if hint else ''}{hint}"
    return RequestRejected(message, param=name, code="unknown_parameter")


@dataclass(frozen=True, slots=True)
class _Plan:
    """How to read a field's values: objects of ``struct``, lists of ``item``, or whole numbers."""

    struct: StructType | None = None
    item: _Plan | None = None
    is_whole: bool = False


@dataclass(slots=True)
class _Reading:
    """Reader of one request's JSON values along its types.

    ``path`` has the names and list indexes of the value being read. ``ignored`` has names without list indexes.
    """

    path: list[str | int] = field(default_factory=list[str | int])
    ignored: dict[str, None] = field(default_factory=dict[str, None])

    def object(self, given: Mapping[str, Any], kind: StructType) -> dict[str, Any]:
        """Return the fields of an object that ``kind`` has, and note the other names in ``ignored``.

        Raises RequestRejected for an unknown field that may not be ignored: see `known_fields`.
        """
        plans = _plans_of(kind)
        own_types = getattr(kind, "OWN_TYPES", None)
        # Objects of a foreign type are skipped, with all their fields.
        is_foreign = own_types is not None and given.get("type") not in own_types
        known: dict[str, Any] = {}
        for name, value in given.items():
            plan = plans.get(name)
            if plan is not None:
                self.path.append(name)
                known[name] = self.value(value, plan)
                self.path.pop()
            elif value is not None and not is_foreign:
                self._unknown(name, value, given, kind)
        return known

    def value(self, value: Any, plan: _Plan) -> Any:
        """Return a value without the unknown fields of its objects, and with whole numbers as integers."""
        if isinstance(value, dict):
            return value if plan.struct is None else self.object(value, plan.struct)
        if isinstance(value, list):
            return value if plan.item is None else self._items(value, plan.item)
        return int(value) if plan.is_whole and isinstance(value, float) and value.is_integer() else value

    def _items(self, values: Sequence[Any], plan: _Plan) -> list[Any]:
        items: list[Any] = []
        self.path.append(0)
        for i, value in enumerate(values):
            self.path[-1] = i
            items.append(self.value(value, plan))
        self.path.pop()
        return items

    def _unknown(self, name: str, value: Any, given: Mapping[str, Any], kind: StructType) -> None:
        refused = _refused_by(kind).get(name)
        if refused is not None:
            if value not in refused:
                raise _unsupported(self._path_of(name), name, kind)
            return
        if getattr(kind, "CLOSED", False):
            raise unrecognized(self._path_of(name))
        for meant in _resembling(name[:100], kind):
            if given.get(meant) is None and _fits(value, _types_of(kind)[meant]):
                raise unrecognized(self._path_of(name), f" Did you mean `{meant}`?")
        self.ignored[".".join([*(each for each in self.path if isinstance(each, str)), name])] = None
        if len(self.ignored) > MAX_UNKNOWN:
            raise unrecognized(self._path_of(name), f" More than {MAX_UNKNOWN} fields are unknown.")

    def _path_of(self, name: str) -> str:
        steps = "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in (*self.path, name[:100]))
        return steps.removeprefix(".")


@cache
def _types_of(kind: StructType) -> dict[str, Any]:
    """Return the annotated types of a struct's fields."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: hints[name] for name in kind.__struct_fields__}


@cache
def _plans_of(kind: StructType) -> dict[str, _Plan]:
    return {name: _plan_of(annotation) for name, annotation in _types_of(kind).items()}


def _plan_of(kind: Any) -> _Plan:
    options = _options(kind)
    items = (_plan_of(get_args(each)[0]) for each in options if get_origin(each) is list)
    return _Plan(
        struct=next(filter(_is_struct, options), None),
        item=next((item for item in items if item != _Plan()), None),
        is_whole=int in options and float not in options,
    )


@cache
def _refused_by(kind: StructType) -> dict[str, tuple[Any, ...]]:
    """Return the unknown fields that an object must not have, with their neutral values."""
    types = _types_of(kind)
    refused = dict(OTHERS if kind in (*_READING, *_GENERATING) else _OTHERS_WITHIN.get(kind, {}))
    for family in (_READING, (*_GENERATING, *_READING), _FORMATS, _FUNCTIONS):
        if kind in family:
            for other in family:
                for name, annotation in _types_of(other).items():
                    if name not in types and not _mark(annotation, "inert", False):
                        refused[name] = (*refused.get(name, ()), *_mark(annotation, "neutral", ()))
            break
    return refused


@cache
def _shapes_of(kind: Any) -> tuple[tuple[str, StructType], ...]:
    """Return the fields that are lists of shaped objects, with the shapes."""
    shapes = ((name, _mark(annotation, "shape", None)) for name, annotation in _types_of(kind).items())
    return tuple((name, shape) for name, shape in shapes if shape is not None)


def _mark(annotation: Any, name: str, default: Any) -> Any:
    marks = (mark.extra for mark in getattr(annotation, "__metadata__", ()) if isinstance(mark, msgspec.Meta))
    return next((extra[name] for extra in marks if extra is not None and name in extra), default)


def _options(kind: Any) -> tuple[Any, ...]:
    """Return the types that a value of a field may have."""
    if get_origin(kind) is Annotated:
        return _options(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return tuple(option for each in get_args(kind) for option in _options(each))
    return (kind,)


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value could be of a field's type. The fields of objects are not checked."""
    if isinstance(value, dict) and any(map(_is_struct, _options(kind))):
        return True
    try:
        msgspec.convert(_Reading().value(value, _plan_of(kind)), kind)
    except msgspec.ValidationError:
        return False
    return True


def _unsupported(path: str, name: str, kind: StructType) -> RequestRejected:
    types = _types_of(kind)
    groups = _SYNONYMS if kind in (*_READING, *_GENERATING) else _SYNONYMS_WITHIN
    known = (each for synonyms in groups if name in synonyms for each in synonyms if each in types)
    instead = next((f" Use `{each}`." for each in known), "")
    return RequestRejected(f"`{path}` is not supported by this server.{instead}", param=path, code="unsupported_value")


@lru_cache(maxsize=1024)
def _resembling(name: str, kind: StructType) -> tuple[str, ...]:
    """Return the fields that change an answer and whose names equal ``name`` except for case, dashes or one letter.

    Empty for a name shorter than 4 letters or longer than 40.
    """
    key = _key(name)
    if not 4 <= len(key) <= 40:
        return ()
    return tuple(
        known
        for known, annotation in _types_of(kind).items()
        if not _mark(annotation, "inert", False) and _is_one_edit(key, _key(known))
    )


def _key(name: str) -> str:
    return name[:100].lower().replace("_", "").replace("-", "")


def _is_one_edit(one: str, other: str) -> bool:
    """Return whether the two are equal, or differ by one letter added, removed or replaced."""
    if len(one) < len(other):
        one, other = other, one
    if len(one) - len(other) > 1:
        return False
    same = next((i for i, letter in enumerate(other) if letter != one[i]), len(other))
    return one[same + 1 :] == (other[same:] if len(one) > len(other) else other[same + 1 :])
