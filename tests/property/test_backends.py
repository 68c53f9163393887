"""Scarce transfer backends: computed KV goes before KV that is being computed, and nobody starves."""

from __future__ import annotations

import random

import hypothesis.strategies as st
from hypothesis import given, settings

from pdmesh.core.requests.broker import TransferBroker
from pdmesh.core.requests.copy import Copy
from pdmesh.kv_layout import IndexRange, KvPart
from pdmesh.model import Epoch, InstanceId, RequestId, RequestKey
from pdmesh.plans import KvShard
from pdmesh_testing.examples import examples

RECEIVER = InstanceId("d")
PART = KvPart(IndexRange(0, 4), IndexRange(0, 2), IndexRange(0, 1))
SOURCE, DESTINATION = (KvShard(instance_id=InstanceId(name), part=PART) for name in ("p", RECEIVER))


class Line:
    """Prompts that are offered, computed and land, each a name; the laws are checked with every grant."""

    def __init__(self, num_backends: int, *, computed_first: bool) -> None:
        self.offered: list[RequestKey] = []
        self.computed: set[RequestKey] = set()
        self.granted: dict[RequestKey, Copy] = {}
        self.landed: set[RequestKey] = set()
        self.computed_first = computed_first
        self.broker = TransferBroker(lambda _: False, self.computed.__contains__, random.Random(0))
        self.broker.computed_first = computed_first
        self.broker.join(RECEIVER, num_backends)

    def offer(self) -> None:
        key = RequestId(f"r{len(self.offered)}"), Epoch(0)
        self.offered.append(key)
        transfer = self.broker.open(key, (SOURCE,), (DESTINATION,))
        self.broker.reserve(transfer, RECEIVER)
        self.note(self.broker.offer(transfer))

    def land(self, key: RequestKey) -> None:
        self.landed.add(key)
        self.note(self.broker.land(self.granted[key], RECEIVER))

    def note(self, granted: list[Copy]) -> None:
        for transfer in granted:
            index = self.offered.index(transfer.key)
            self.granted[transfer.key] = transfer
            earlier = {key for key in self.offered[:index] if key not in self.granted}
            later = {key for key in self.offered[index:] if key not in self.granted}
            if not self.computed_first:
                assert not earlier, f"{transfer.key} overtakes {earlier}"
            elif transfer.key in self.computed:
                assert not earlier & self.computed, f"{transfer.key} overtakes {earlier & self.computed}"
            else:
                assert not earlier, f"{transfer.key} overtakes {earlier}"
                assert not later & self.computed, f"{later & self.computed} wait for {transfer.key}, not yet computed"
        self.broker.check_integrity()

    @property
    def can_land(self) -> list[RequestKey]:
        return [key for key in self.granted if key in self.computed and key not in self.landed]


@settings(deadline=None, max_examples=examples(200))
@given(data=st.data(), num_backends=st.integers(1, 3), computed_first=st.booleans())
def test_computed_kv_goes_first_and_all_lands(data: st.DataObject, num_backends: int, computed_first: bool) -> None:
    line = Line(num_backends, computed_first=computed_first)
    for what in data.draw(st.lists(st.sampled_from(("offer", "compute", "compute", "land")), max_size=60)):
        uncomputed = [key for key in line.offered if key not in line.computed]
        if what == "offer":
            line.offer()
        elif what == "compute" and uncomputed:
            line.computed.add(data.draw(st.sampled_from(uncomputed)))
        elif what == "land" and line.can_land:
            line.land(data.draw(st.sampled_from(line.can_land)))
    while len(line.landed) < len(line.offered):
        line.computed.update(line.offered)
        assert line.can_land, "somebody waits, and nothing is under way"
        line.land(line.can_land[0])


@settings(deadline=None, max_examples=examples(200))
@given(data=st.data(), num_backends=st.integers(1, 3))
def test_only_earlier_offers_go_before_what_is_computed(data: st.DataObject, num_backends: int) -> None:
    """However many come and are computed meanwhile: so its wait is bounded by those who were there."""
    line = Line(num_backends, computed_first=True)
    for _ in range(data.draw(st.integers(num_backends + 1, 12))):
        line.offer()
    waiting = [key for key in line.offered if key not in line.granted]
    one = data.draw(st.sampled_from(waiting))
    num_before = line.offered.index(one)
    line.computed.update({one, *line.granted})
    num_landed = 0
    while one not in line.granted:
        for _ in range(data.draw(st.integers(0, 3))):
            line.offer()
        line.computed.update(data.draw(st.lists(st.sampled_from(line.offered))))
        line.computed.update(line.granted)
        line.land(data.draw(st.sampled_from(line.can_land)))
        num_landed += 1
        assert num_landed <= num_before, f"{num_landed} landed, and {one}, with {num_before} before it, waits yet"
