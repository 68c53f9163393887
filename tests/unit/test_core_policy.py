from __future__ import annotations

import pytest

from pdmesh.errors import ConfigError
from pdmesh.model import Epoch, RequestId
from pdmesh.plans import ChunkPlan
from pdmesh.policy.bundles import make_bundle
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.packing import StaticChunks
from pdmesh.policy.placement import Freeness, LeastQueuedTokens
from pdmesh.policy.views import PartialStep
from pdmesh_testing.core import a_request, a_view

REQUEST = a_request("r", prompt=100)


def test_freeness_divides_what_is_free_by_the_batch() -> None:
    place = Freeness()
    crowded = a_view("a", num_free_blocks=60, num_seats_taken=4)  # 15
    roomy = a_view("b", num_free_blocks=40, num_seats_taken=2)  # 20
    assert place.key(roomy) < place.key(crowded)
    assert place.key(a_view("b")) == place.key(a_view("c"))
    assert place.stays(REQUEST, crowded, roomy)


def test_least_queued_tokens() -> None:
    place = LeastQueuedTokens()
    assert place.key(a_view("b", num_queued_tokens=8)) < place.key(a_view("a", num_queued_tokens=9))
    assert place.key(a_view("b")) == place.key(a_view("a"))


def test_static_chunks_fill_a_step_and_no_more() -> None:
    packing, step = StaticChunks(64), PartialStep()
    assert packing.num_tokens(a_view(), step, REQUEST, 0) == 64
    assert packing.num_tokens(a_view(), step, REQUEST, 90) == 10
    step.add(ChunkPlan(request_id=RequestId("x"), epoch=Epoch(0), start=0, num_tokens=64, is_last=True), 64)
    assert packing.num_tokens(a_view(), step, REQUEST, 0) == 0


def test_an_unknown_bundle_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'quick'.*fcfs"):
        make_bundle("quick", PolicyConfig())
