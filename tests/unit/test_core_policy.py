from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.errors import ConfigError
from pdmesh.model import ChunkPlan, Epoch, InstanceId, RequestId, Role
from pdmesh.policy.base import Draft, InstanceView, PolicyConfig
from pdmesh.policy.bundles import make_bundle
from pdmesh.policy.packing import StaticChunks
from pdmesh.policy.placement import Freeness, LeastQueuedTokens
from pdmesh.testing.core import a_request

VIEW = InstanceView(
    instance_id=InstanceId("a"),
    role=Role.DECODE,
    num_blocks=64,
    num_free_blocks=64,
    num_virtual_blocks=0,
    num_seats_taken=0,
    max_num_seqs=8,
    num_prefilling=0,
    num_decoding=0,
    num_queued_tokens=0,
    draining=False,
)
REQUEST = a_request("r", prompt=100)


def view(name: str, **numbers: int) -> InstanceView:
    return replace(VIEW, instance_id=InstanceId(name), **numbers)  # type: ignore[arg-type] # numbers by name


def test_freeness_divides_what_is_free_by_the_batch() -> None:
    choose = Freeness().choose
    crowded = view("a", num_free_blocks=60, num_seats_taken=4)  # 15
    roomy = view("b", num_free_blocks=40, num_seats_taken=2)  # 20
    assert choose(REQUEST, view("p"), [crowded, roomy]) == "b"
    assert choose(REQUEST, view("p"), [view("c"), view("b")]) == "b"
    assert choose(REQUEST, crowded, [crowded, roomy]) == "a"


def test_least_queued_tokens() -> None:
    choose = LeastQueuedTokens().choose
    assert choose(REQUEST, [view("a", num_queued_tokens=9), view("b", num_queued_tokens=8)]) == "b"
    assert choose(REQUEST, [view("b"), view("a")]) == "a"


def test_static_chunks_fill_a_step_and_no_more() -> None:
    packing, draft = StaticChunks(64, 256), Draft()
    assert packing.num_tokens(VIEW, draft, REQUEST, 0) == 64
    assert packing.num_tokens(VIEW, draft, REQUEST, 90) == 10
    draft.add(ChunkPlan(request_id=RequestId("x"), epoch=Epoch(0), start=0, num_tokens=64, is_last=True), REQUEST)
    assert packing.num_tokens(VIEW, draft, REQUEST, 0) == 0


def test_an_unknown_bundle_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'quick'.*fcfs"):
        make_bundle("quick", PolicyConfig())
