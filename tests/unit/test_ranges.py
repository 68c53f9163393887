"""What a number may be is said by its type, and msgspec asks for it where values come from elsewhere."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import msgspec
import pytest

from pdmesh.core.events import RequestCancelled
from pdmesh.ranges import COUNT, FINITE, SECONDS


@dataclass(frozen=True)
class Part:
    num: Annotated[int, COUNT]


@dataclass(frozen=True)
class Whole:
    wait_s: Annotated[float, SECONDS] | None = None
    at_s: Annotated[float, FINITE] = 0.0
    free: int = -1
    part: Part | None = None
    parts: tuple[Part, ...] = ()


def decoded(value: dict[str, object]) -> Whole:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=Whole)


def test_numbers_within_their_ranges_are_decoded() -> None:
    whole = decoded({"wait_s": 1, "at_s": -1e9, "part": {"num": 1}, "parts": [{"num": 1}, {"num": 2}], "free": -7})
    assert whole == Whole(1.0, -1e9, -7, Part(1), (Part(1), Part(2)))


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"wait_s": -0.5}, r"\$\.wait_s"),
        ({"wait_s": math.inf}, r"\$\.wait_s"),
        ({"at_s": math.nan}, r"\$\.at_s"),
        ({"at_s": -math.inf}, r"\$\.at_s"),
        ({"part": {"num": 0}}, r"\$\.part\.num"),
        ({"parts": [{"num": 1}, {"num": -3}]}, r"\$\.parts\[1\]\.num"),
    ],
)
def test_a_number_out_of_its_range_is_refused_with_its_place(value: dict[str, object], place: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=place):
        decoded(value)


def test_a_cancels_tokens_have_a_range() -> None:
    def cancel(num_output_tokens: int | None) -> RequestCancelled:
        return msgspec.convert(
            {"gateway_id": "g", "request_id": "r", "epoch": 0, "num_output_tokens": num_output_tokens}, RequestCancelled
        )

    assert [cancel(number).num_output_tokens for number in (None, 0, 7)] == [None, 0, 7]
    with pytest.raises(msgspec.ValidationError, match=">= 0"):
        cancel(-1)
