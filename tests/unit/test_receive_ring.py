"""Receives that a dead sender holds: counted out, replaced, and welcome if they arrive after all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pdmesh.transport.buffers import MAX_PIECES, allocate_buffers
from pdmesh.transport.prefix import HEAD_BYTES, PREFIX_BYTES, FoundPiece, number_piece
from pdmesh.transport.ring import STALL_S, ReceiveRing
from pdmesh.transport.ucx_api import UcxApi


@dataclass
class FakeRequest:
    memory: memoryview
    completed: bool = False


@dataclass
class FakeWorker:
    """Messages match posted receives in order; what is left waits."""

    receives: list[FakeRequest] = field(default_factory=list[FakeRequest])
    num_messages: int = 0

    def tag_recv(self, memory: memoryview, *_: object) -> FakeRequest:
        self.receives.append(FakeRequest(memory))
        return self.receives[-1]

    def tag_probe(self, *_: object, remove: bool) -> SimpleNamespace:
        return SimpleNamespace(matched=self.num_messages > len(self.receives))

    def complete(self, number: int) -> None:
        request = self.receives[number]
        number_piece(request.memory, FoundPiece(0, 8, 0, 0))
        request.completed = True


class Ring:
    def __init__(self, num_buffers: int, num_posted: int = 1) -> None:
        self.worker = FakeWorker()
        self.timers: list[Callable[[], None]] = []
        self.num_wakes = 0
        api = SimpleNamespace(
            worker=self.worker, array=lambda memory: memory, tag=None, any_tag=None, error_of=lambda _: None
        )
        self.ring = ReceiveRing(
            allocate_buffers(num_buffers + num_posted, 8, PREFIX_BYTES),
            num_buffers,
            api=cast(UcxApi, api),
            wake=self.wake,
            call_later=self.call_later,
        )
        self.drive()

    def wake(self) -> None:
        self.num_wakes += 1

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        assert delay_s >= STALL_S
        self.timers.append(callback)

    def drive(self) -> None:
        self.ring.post()
        self.ring.reap()
        self.ring.check_integrity()

    def fire(self) -> None:
        timers, self.timers = self.timers, []
        for callback in timers:
            callback()
        self.drive()

    def take(self) -> Any:
        return self.ring._arrived.popleft()


@pytest.mark.parametrize("num_posted", [1, 3])
def test_a_receive_that_never_ends_is_replaced_and_may_still_arrive(num_posted: int) -> None:
    ring = Ring(8, num_posted)
    assert len(ring.worker.receives) == num_posted
    ring.worker.num_messages = num_posted  # all are read from a sender that is killed now
    ring.drive()
    assert ring.timers == []  # nobody waits for them
    ring.worker.num_messages += 1  # another sender's
    ring.drive()
    ring.drive()
    assert len(ring.timers) == 1
    ring.fire()
    assert ring.num_wakes == 1
    assert len(ring.worker.receives) == 2 * num_posted
    ring.worker.complete(num_posted)
    ring.drive()
    ring.take().release()
    ring.worker.complete(0)  # it was only slow
    ring.drive()
    ring.take().release()
    ring.drive()
    assert sum(not request.completed for request in ring.worker.receives) == 2 * num_posted - 1


def test_a_busy_ring_posts_no_more_than_it_was_told() -> None:
    """Messages wait all the time, and pieces arrive."""
    ring = Ring(8)
    ring.worker.num_messages = 1000
    for number in range(50):
        ring.drive()
        ring.worker.complete(number)
        ring.drive()
        ring.take().release()
        if number % 7 == 0:
            ring.fire()
        ring.drive()
        assert sum(not request.completed for request in ring.worker.receives) == 1


@pytest.mark.parametrize("what", ["garbage", "too long", "another length", "too many"])
def test_pieces_before_what_is_none_are_taken_and_the_rest_is_counted(what: str) -> None:
    ring = Ring(2)
    (request,) = ring.worker.receives
    num_sound = MAX_PIECES if what == "too many" else 2
    total = (num_sound + 1) * (HEAD_BYTES + 8)
    for number in range(num_sound + 1):
        end = (number + 1) * (HEAD_BYTES + 8)
        number_piece(request.memory, FoundPiece(end - HEAD_BYTES - 8, 8, total - end, 0))
    last = num_sound * (HEAD_BYTES + 8)
    if what == "garbage":
        request.memory[last : last + HEAD_BYTES] = bytes(HEAD_BYTES)
    elif what != "too many":
        number_piece(request.memory, FoundPiece(last, 2**31 if what == "too long" else 7, 0, 0))
    request.completed = True
    ring.drive()
    assert ring.ring.num_malformed == 1
    pieces = [ring.take() for _ in range(num_sound)]
    assert [piece.payload.nbytes for piece in pieces] == [8] * num_sound
    assert not ring.ring._arrived
    for piece in pieces:
        assert ring.ring._num_held == 1
        piece.release()
    ring.drive()
    assert ring.ring._num_held == 0


def test_what_is_held_for_good_is_bounded_by_the_buffers() -> None:
    ring = Ring(4)
    ring.worker.num_messages = 1000
    for _ in range(10):
        ring.drive()
        ring.fire()
    assert len(ring.worker.receives) == 4
    ring.worker.complete(2)
    ring.drive()
    ring.take().release()
    ring.drive()
    assert len(ring.worker.receives) == 5
