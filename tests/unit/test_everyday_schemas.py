"""Schemas that pydantic and zod write for everyday types: each is accepted, and answers held to it fit it."""

from __future__ import annotations

import copy
import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import random
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Optional, Union

import msgspec
import numpy as np
import pydantic
import pytest
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import extend
from pydantic import BaseModel, Field, TypeAdapter, conlist, constr
from tokenizers import Tokenizer
from typing_extensions import TypedDict

from pdmesh.engine.grammar_state import GrammarState
from pdmesh.errors import RequestRejected
from pdmesh.grammars import Grammars
from pdmesh_gateway.answer_format import FORMATS, AnswerFormat
from pdmesh_gateway.answer_grammars import GrammarChecker
from pdmesh_gateway.http.responses.responses_protocol import ResponsesRequest
from pdmesh_gateway.http.responses.responses_requests import fields_of
from pdmesh_gateway.protocol.chat_protocol import ChatRequest
from pdmesh_gateway.reasoning import ReasoningStart
from pdmesh_gateway.tools.tool_choice import Tool, ToolChoice, calls_of
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.grammar_judge import InProcessJudge

pytestmark = pytest.mark.anyio

EOS = (258, 256)
#: Texts that patterns ask for, and chance would not write.
HINTS = ("ab", ".py", "a@b.de", "pd-", "@", "z", "😀")
CLOSERS = (b'"', b"}", b"]", b",", b"n")


class Color(enum.Enum):
    RED = "red"
    GREEN = "green"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Address(BaseModel):
    street: str
    zip: str = Field(pattern=r"^\d{5}$")
    city: str | None = None


class Person(BaseModel):
    name: str = Field(min_length=1, max_length=20, description="Full name")
    age: int = Field(ge=0, le=150)
    home: Address
    tags: list[str] = []


class Closed(BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    a: int


class Open(BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    a: int


class Node(BaseModel):
    value: int
    children: list[Node] = []


class Linked(BaseModel):
    value: str
    next: Optional[Linked] = None  # noqa: UP045


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str


class Owner(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    others: list[Cat | Dog] = []


class Number(BaseModel):
    op: Literal["number"]
    value: float


class Sum(BaseModel):
    op: Literal["sum"]
    left: Expression
    right: Expression


Expression = Annotated[Union[Number, "Sum"], Field(discriminator="op")]
Sum.model_rebuild()


class Aliased(BaseModel):
    first: str = Field(alias="firstName", examples=["Ann"])
    url: pydantic.HttpUrl = Field(title="Where")


class Base(BaseModel):
    id: uuid.UUID


class Derived(Base):
    made: datetime.datetime
    price: decimal.Decimal


class Point(NamedTuple):
    x: float
    y: float


class Movie(TypedDict):
    title: str
    year: int


class Account(BaseModel):
    login: str
    secret: pydantic.SecretStr
    roles: dict[Color, int]
    seen: list[datetime.date] = Field(max_length=2)


class Chosen(BaseModel):
    any: Any
    free: dict[str, Any]


@pydantic.dataclasses.dataclass
class Pair:
    left: int
    right: str = "x"


#: Types whose schema has a constraint that no grammar holds: `strict` is refused.
NOT_STRICT = {"set_of_strings", "frozenset_of_ints"}

PYDANTIC: dict[str, Any] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": bool,
    "none": None,
    "bytes": bytes,
    "any": Any,
    "decimal": decimal.Decimal,
    "decimal_places": Annotated[decimal.Decimal, Field(max_digits=5, decimal_places=2)],
    "date": datetime.date,
    "datetime": datetime.datetime,
    "aware_datetime": pydantic.AwareDatetime,
    "time": datetime.time,
    "timedelta": datetime.timedelta,
    "uuid": uuid.UUID,
    "uuid4": pydantic.UUID4,
    "path": pathlib.Path,
    "file_path": pydantic.FilePath,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "ipv4_network": ipaddress.IPv4Network,
    "ipv6_interface": ipaddress.IPv6Interface,
    "any_url": pydantic.AnyUrl,
    "http_url": pydantic.HttpUrl,
    "secret": pydantic.SecretStr,
    "secret_bytes": pydantic.SecretBytes,
    "base64": pydantic.Base64Bytes,
    "byte_size": pydantic.ByteSize,
    "pattern": re.Pattern[str],
    "strict_int": pydantic.StrictInt,
    "positive": pydantic.PositiveInt,
    "non_negative_float": pydantic.NonNegativeFloat,
    "past": pydantic.PastDate,
    "constr": constr(min_length=2, max_length=5, pattern="^[a-z]+$"),
    "constr_search": constr(pattern="ab"),
    "quoted": constr(pattern='^"[a-z]+"$'),
    "percent": Annotated[int, Field(ge=0, le=100, multiple_of=5)],
    "ratio": Annotated[float, Field(gt=0, lt=1)],
    "literal": Literal["a", "b"],
    "literal_mixed": Literal["a", 1, None, True],
    "enum": Color,
    "int_enum": Level,
    "list": list[str],
    "list_plain": list,
    "conlist": conlist(int, min_length=1, max_length=3),
    "set_of_strings": set[str],
    "set_of_enum": set[Color],
    "set_of_bools": set[bool],
    "frozenset_of_ints": frozenset[int],
    "tuple": tuple[int, str],
    "tuple_of_any_length": tuple[float, ...],
    "dict": dict[str, int],
    "dict_plain": dict,
    "dict_enum": dict[Color, float],
    "dict_literal": dict[Literal["x", "y"], str],
    "dict_int": dict[int, str],
    "dict_uuid": dict[uuid.UUID, int],
    "dict_pattern": dict[Annotated[str, Field(pattern="^[a-z]{2}$")], int],
    "dict_date": dict[datetime.date, int],
    "dict_of_lists": dict[str, list[Color]],
    "mapping": Mapping[str, bool],
    "sequence": Sequence[int],
    "iterable": Iterable[int],
    "optional": Optional[int],  # noqa: UP045
    "union": int | str | None,
    "nested_optional": list[dict[str, int | None]],
    "address": Address,
    "person": Person,
    "people": list[Person],
    "closed": Closed,
    "open": Open,
    "tree": Node,
    "linked": Linked,
    "owner": Owner,
    "pets": list[Annotated[Cat | Dog, Field(discriminator="kind")]],
    "expression": Expression,
    "aliased": Aliased,
    "derived": Derived,
    "point": Point,
    "movie": Movie,
    "account": Account,
    "chosen": Chosen,
    "dataclass": Pair,
    "annotated_list": Annotated[list[Annotated[str, Field(max_length=3)]], Field(min_length=1, max_length=4)],
    "email_like": Annotated[str, Field(pattern=r"^[^@\s]+@[^@\s]+\.[a-z]+$")],
    "card": pydantic.PaymentCardNumber if hasattr(pydantic, "PaymentCardNumber") else str,
}


def everyday() -> dict[str, Any]:
    written = json.loads((Path(__file__).parent / "zod_schemas.json").read_text())
    found = {f"zod-{name}": schema for name, schema in written.items()}
    return found | {f"pydantic-{name}": TypeAdapter(of).json_schema() for name, of in PYDANTIC.items()}


SCHEMAS = everyday()


def test_there_are_enough_types() -> None:
    assert len(SCHEMAS) >= 150


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def grammars(directory: Path) -> Grammars:
    return Grammars(directory, vocab_size=320, eos_token_ids=EOS)


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Any:
    if validator.is_type(instance, "string") and "\\p{" not in pattern and not re.search(pattern, instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


Validator = extend(Draft202012Validator, {"pattern": _pattern})


def without(schema: Any, warnings: Sequence[str]) -> Any:
    """The schema without the constraints that warnings name."""
    schema = copy.deepcopy(schema)
    for warning in warnings:
        found = re.search(r"is not checked against #(\S*) \(", warning)
        assert found is not None, warning
        *where, last = [part.replace("~1", "/").replace("~0", "~") for part in found[1].split("/")[1:]]
        parent = schema
        for part in where:
            parent = parent[int(part) if isinstance(parent, list) else part]
        del parent[last]
    return schema


def written(grammars: Grammars, tokenizer: Tokenizer, grammar: str, rng: random.Random) -> str:
    """A whole answer, drawn at random from what the engine allows. It ends soon where it may."""
    guide = GrammarState(grammars.matcher(grammar), EOS)
    closers = [tokenizer.encode(closer.decode(), add_special_tokens=False).ids[0] for closer in CLOSERS]
    output: list[int] = []
    hint: list[int] = []
    while not guide.is_complete:
        assert len(output) < 3000, tokenizer.decode(output)[:100]
        bits = guide.allowed(320, EOS)
        assert bits is not None, guide.error
        allowed = np.flatnonzero(np.unpackbits(bits, count=320, bitorder="little")).tolist()
        if EOS[0] in allowed:
            break
        ending = [closer for closer in closers if closer in allowed]
        if not hint and rng.random() < 0.2:
            hint = tokenizer.encode(rng.choice(HINTS), add_special_tokens=False).ids
        if hint and hint[0] in allowed:
            token_id = hint.pop(0)
        else:
            hint = []
            token_id = (
                ending[0] if ending and rng.random() < (0.8 if len(output) > 100 else 0.3) else rng.choice(allowed)
            )
        output.append(token_id)
        guide.take([token_id])
        assert not guide.error
    return tokenizer.decode(output)


def wrapped(schema: Any) -> dict[str, Any]:
    """The schema of an object, as parameters of tools are."""
    if schema.get("type") == "object":
        return dict(schema)
    shared = {key: schema[key] for key in ("$defs",) if key in schema}
    inner = {key: value for key, value in schema.items() if key not in ("$defs", "$schema")}
    return {"type": "object", "properties": {"value": inner}, "required": ["value"], **shared}


def chat(schema: Any, strict: bool) -> ChatRequest:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": strict}}
    body = {"messages": [{"role": "user", "content": "?"}], "response_format": wanted}
    return msgspec.json.decode(json.dumps(body), type=ChatRequest)


def response(schema: Any, strict: bool) -> ResponsesRequest:
    wanted = {"type": "json_schema", "name": "x", "schema": schema, "strict": strict}
    return msgspec.json.decode(json.dumps({"input": "?", "text": {"format": wanted}}), type=ResponsesRequest)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", SCHEMAS)
async def test_answers_fit_an_everyday_type(grammars: Grammars, tokenizer: Tokenizer, name: str, strict: bool) -> None:
    checker, rng, schema = GrammarChecker(InProcessJudge(grammars)), random.Random(name), SCHEMAS[name]
    if strict and name.removeprefix("pydantic-") in NOT_STRICT:
        with pytest.raises(RequestRejected, match="uniqueItems"):
            await checker.grammar(chat(schema, strict))
        return
    for fields in (chat(schema, strict), fields_of(response(schema, strict))):
        grammar, warnings = await checker.grammar(fields)
        answer = written(grammars, tokenizer, grammar, rng)
        Validator(without(schema, warnings)).validate(json.loads(answer))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", SCHEMAS)
async def test_arguments_fit_an_everyday_type(
    grammars: Grammars, tokenizer: Tokenizer, name: str, strict: bool
) -> None:
    checker, rng, parameters = GrammarChecker(InProcessJudge(grammars)), random.Random(name), wrapped(SCHEMAS[name])
    tools = [Tool(name="f", parameters=parameters, strict=strict)]
    if strict and name.removeprefix("pydantic-") in NOT_STRICT:
        with pytest.raises(RequestRejected, match="uniqueItems"):
            await calls_of(tools, ToolChoice(mode="required"), checker, most=1)
        return
    calls, warnings = await calls_of(tools, ToolChoice(mode="required"), checker, most=1)
    answers = AnswerFormat(tools=FORMATS["hermes"], textless_ids={})
    grammar = answers.grammar(ReasoningStart.NONE, calls, "")
    answer = written(grammars, tokenizer, grammar, rng)
    call = json.loads(answer.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    Validator(without(parameters, warnings)).validate(call["arguments"])
