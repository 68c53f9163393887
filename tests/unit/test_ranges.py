"""What a number may be is said by its type, and asked where values come from elsewhere."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated

import pytest

from pdmesh.core.events import RequestCancelled
from pdmesh.model import Epoch, GatewayId, RequestId
from pdmesh.ranges import COUNT, FINITE, Range, out_of_range


@dataclass(frozen=True)
class Part:
    num: Annotated[int, COUNT]


@dataclass(frozen=True)
class Whole:
    share: Annotated[float | None, Range(0, 1)] = None
    at_s: Annotated[float, FINITE] = 0.0
    free: int = -1
    part: Part | None = None
    parts: tuple[Part, ...] = ()


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (Whole(), None),
        (Whole(share=1.0, at_s=-1e9, part=Part(1), parts=(Part(1), Part(2))), None),
        (Whole(share=1.5), "share is 1.5: must be a number from 0 to 1"),
        (Whole(at_s=math.nan), "at_s is nan: must be a number that is finite"),
        (Whole(at_s=-math.inf), "at_s is -inf: must be a number that is finite"),
        (Whole(part=Part(0)), "part: num is 0: must be a number of at least 1"),
        (Whole(parts=(Part(1), Part(-3))), "parts: num is -3: must be a number of at least 1"),
        (replace(Whole(), free=-(2**70)), None),
    ],
)
def test_the_first_number_out_of_its_range_is_named(value: Whole, problem: str | None) -> None:
    assert out_of_range(value) == problem


def test_a_cancels_tokens_have_a_range() -> None:
    def cancel(num_output_tokens: int | None) -> RequestCancelled:
        return RequestCancelled(GatewayId("g"), RequestId("r"), Epoch(0), num_output_tokens)

    assert [out_of_range(cancel(number)) for number in (None, 0, 7)] == [None, None, None]
    assert "num_output_tokens is -1" in (out_of_range(cancel(-1)) or "")
