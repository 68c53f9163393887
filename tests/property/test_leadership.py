"""Who leads among several schedulers: in virtual time, with clocks of their own, whatever is lost or stopped."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count, pairwise
from math import inf
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh_scheduler.standby.leadership import ASK_EVERY_S, MARGIN, Candidate, LeaseRecord, LeaseWrite

T = TypeVar("T")

LEASE_S = 3.0
LIMIT_S = LEASE_S / 2

#: Faults end then, and all must be well some time after.
CALM_S, END_S = 60.0, 80.0


@dataclass
class World:
    """A store, and the time that all its users share without knowing it."""

    rng: random.Random
    now_s: float = 0.0
    record: LeaseRecord | None = None
    revision: int = 0
    terms: list[int] = field(default_factory=list[int])
    _agenda: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _numbers: count[int] = field(default_factory=count)

    def after(self, delay_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self.now_s + delay_s, next(self._numbers), what))

    def run(self, end_s: float, look: Callable[[], None]) -> None:
        while self._agenda and self._agenda[0][0] <= end_s:
            self.now_s, _, what = heapq.heappop(self._agenda)
            what()
            look()

    @property
    def version(self) -> str | None:
        return None if self.record is None else str(self.revision)

    def swap(self, attempt: LeaseWrite) -> str | None:
        if attempt.version != self.version:
            return None
        self.record, self.revision = attempt.record, self.revision + 1
        if attempt.record.holder_id:
            self.terms.append(attempt.record.term)
        return str(self.revision)

    @property
    def is_calm(self) -> bool:
        return self.now_s >= CALM_S


class Scheduler:
    """Does with a candidate what `LeaseKeeper` does, on a clock that is wrong, and stops now and then."""

    def __init__(self, world: World, name: str) -> None:
        self._world, self._name, self._lives = world, name, count()
        # The fastest and the slowest clock differ by less than the margin.
        self._rate = world.rng.choice((1 - MARGIN / 2.1, 1 + MARGIN / 2.1)) / (1 + MARGIN / 2.1)
        self._offset_s = world.rng.uniform(-1e6, 1e6)
        self._awake_s = 0.0  # it is stopped until then
        self.begin()

    def begin(self) -> None:
        """Start as a new process."""
        self.candidate = Candidate(f"{self._name}/{next(self._lives)}", self._name, LEASE_S)
        self._world.after(self._world.rng.uniform(0, 1), self._step)

    @property
    def clock_s(self) -> float:
        return self._offset_s + self._world.now_s * self._rate

    @property
    def leads(self) -> bool:
        return self.candidate.leads(self.clock_s)

    def _later(self, delay_s: float, what: Callable[[], None]) -> None:
        """Do something after a delay, or when it goes on; not if it was started again meanwhile."""
        candidate = self.candidate

        def do() -> None:
            if self._world.now_s < self._awake_s:
                self._world.after(self._awake_s - self._world.now_s, do)
            elif candidate is self.candidate:
                what()

        self._world.after(delay_s, do)

    def _step(self) -> None:
        rng, candidate = self._world.rng, self.candidate
        if not self._world.is_calm and rng.random() < 0.03:
            self._awake_s = self._world.now_s + rng.uniform(0, 3 * LEASE_S)
            self._later(0.0, self._step)
            return
        if candidate.until_s > -inf and not self.leads:  # it has led, and ends
            self.begin()
            return
        if not self._world.is_calm and rng.random() < 0.05:
            candidate.ask("gateway", self.clock_s)
        if self.leads and (request := candidate.request) is not None:
            if rng.random() < 0.5:
                self._give(request.asked_by)
                return
            candidate.refuse()
        attempt = candidate.attempt(self.clock_s, 1)
        if attempt is None:
            self._call(lambda: (self._world.record, self._world.version), self._has_read)
        else:
            self._write(attempt)

    def _give(self, address: str) -> None:
        """Stop leading, and end as a process."""
        candidate, given_back = self.candidate, self.candidate.release(address)
        assert not self.leads
        if given_back is not None:
            candidate.sent(given_back, self.clock_s)
            self._call(lambda: self._world.swap(given_back), lambda _: None)
        self._later(2 * LIMIT_S, self.begin)

    def _has_read(self, answer: tuple[LeaseRecord | None, str | None]) -> None:
        self.candidate.observed(*answer, self.clock_s)
        if (attempt := self.candidate.attempt(self.clock_s, 1)) is not None:
            self._write(attempt)
        else:
            self._pause()

    def _write(self, attempt: LeaseWrite) -> None:
        self.candidate.sent(attempt, self.clock_s)

        def has_written(version: str | None) -> None:
            if version is not None:
                self.candidate.written(attempt, version, self.clock_s)
            self._pause()

        if not self._world.is_calm and self._world.rng.random() < 0.02:  # stopped before it leaves
            self._awake_s = self._world.now_s + self._world.rng.uniform(0, 2 * LEASE_S)
        self._later(0.0, lambda: self._call(lambda: self._world.swap(attempt), has_written))

    def _pause(self) -> None:
        self._later(max(0.0, (self.candidate.next_s(self.clock_s) - self.clock_s) / self._rate), self._step)

    def _call(self, do: Callable[[], T], then: Callable[[T], None]) -> None:
        """Ask the store: late, in vain, or with an answer that is lost."""
        rng, is_calm = self._world.rng, self._world.is_calm
        delays_s = [rng.choice((0.001, 0.01, 0.1, 1.0, 4.0)) for _ in range(2)] if not is_calm else [0.001, 0.001]
        fate = "well" if is_calm else rng.choices(("well", "lost", "answer lost"), (20, 1, 2))[0]
        waiting = [True]

        def answered(answer: T) -> None:
            if waiting and fate == "well":
                waiting.clear()
                then(answer)

        def arrive() -> None:
            if fate != "lost":
                answer = do()
                self._later(delays_s[1], lambda: answered(answer))

        def give_up() -> None:
            if waiting:
                waiting.clear()
                self._pause()

        self._world.after(delays_s[0], arrive)
        self._later(LIMIT_S / self._rate, give_up)


def play(seed: int, num_schedulers: int) -> tuple[World, list[Scheduler], list[str | None]]:
    """All that happened; who led at each moment."""
    world = World(random.Random(seed))
    schedulers = [Scheduler(world, f"s{index}") for index in range(num_schedulers)]
    led: list[str | None] = []

    def look() -> None:
        leaders = [each.candidate for each in schedulers if each.leads]
        assert len(leaders) <= 1, "two lead at once"
        name = leaders[0]._holder_id if leaders else None
        if not led or led[-1] != name:
            led.append(name)

    world.run(END_S, look)
    return world, schedulers, led


@pytest.mark.drawn
@given(seed=st.integers(0, 2**32), num_schedulers=st.integers(1, 3))
def test_never_do_two_lead_and_in_the_end_one_does(seed: int, num_schedulers: int) -> None:
    world, schedulers, led = play(seed, num_schedulers)
    assert sum(each.leads for each in schedulers) == 1
    assert len([name for name in led if name]) == len({name for name in led if name}), "one that had ended led again"
    assert all(before <= after for before, after in pairwise(world.terms))


def test_the_lease_changes_hands_in_these_worlds() -> None:
    """Else the law above would say nothing."""
    assert sum(len({name for name in play(seed, 3)[2] if name}) for seed in range(20)) > 60


def alone(now_s: float = 0.0) -> tuple[Candidate, LeaseRecord]:
    """A leader, and the record that made it one."""
    candidate = Candidate("a", "a:1", LEASE_S)
    candidate.observed(None, None, now_s)
    attempt = candidate.attempt(now_s, 7)
    assert attempt is not None
    candidate.sent(attempt, now_s)
    candidate.written(attempt, "1", now_s)
    return candidate, attempt.record


def test_a_leader_stops_a_margin_before_another_may_begin() -> None:
    leader, record = alone()
    other = Candidate("b", "b:1", LEASE_S)
    other.observed(record, "1", 0.0)  # as soon as can be
    hold_s = LEASE_S * (1 - MARGIN)
    assert leader.leads(hold_s - 0.01)
    assert not leader.leads(hold_s)
    other.observed(record, "1", LEASE_S - 0.01)
    assert other.attempt(LEASE_S - 0.01, 1) is None
    taken = other.attempt(LEASE_S, 1)
    assert taken is not None
    assert taken.record.term == record.term + 1


def test_a_renewal_counts_from_when_it_was_sent() -> None:
    leader, _ = alone()
    attempt = leader.attempt(1.0, 0)
    assert attempt is not None
    leader.sent(attempt, 1.0)
    leader.written(attempt, "2", 2.0)
    assert leader.until_s == 1.0 + LEASE_S * (1 - MARGIN)


def test_a_write_without_an_answer_counts_once_it_is_seen() -> None:
    leader, _ = alone()
    attempt = leader.attempt(1.0, 0)
    assert attempt is not None
    leader.sent(attempt, 1.0)
    assert leader.attempt(2.0, 0) is None, "it has to look first"
    leader.observed(attempt.record, "2", 2.0)
    assert leader.until_s == 1.0 + LEASE_S * (1 - MARGIN)


def test_who_has_led_does_not_lead_again() -> None:
    leader, record = alone()
    leader.observed(record, "1", 100.0)
    assert leader.attempt(100.0, 1) is None
    assert not leader.leads(100.0)


def test_a_lease_that_was_given_back_is_taken_at_once_with_what_operators_asked_for() -> None:
    leader, _ = alone()
    leader.state = "drains"
    attempt = leader.attempt(0.1, 0)
    assert attempt is not None, "what is to be kept is written at once"
    leader.sent(attempt, 0.1)
    leader.written(attempt, "2", 0.1)
    given_back = leader.release()
    assert given_back is not None
    assert not leader.leads(0.2)
    other = Candidate("b", "b:1", LEASE_S)
    other.observed(given_back.record, "3", 0.3)
    taken = other.attempt(0.3, 0)
    assert taken is not None
    other.sent(taken, 0.3)
    other.written(taken, "4", 0.3)
    assert (other.leads(0.4), other.state) == (True, "drains")


def leads_at(leader: Candidate, attempt: LeaseWrite | None, version: str, now_s: float) -> LeaseRecord:
    """Let the store take what the candidate wants to write."""
    assert attempt is not None
    leader.sent(attempt, now_s)
    leader.written(attempt, version, now_s)
    return attempt.record


def test_a_lease_that_is_asked_for_goes_to_whom_it_was_asked_by() -> None:
    leader, record = alone()
    other, third = Candidate("b", "b:1", LEASE_S), Candidate("c", "c:1", LEASE_S)
    other.observed(record, "1", 0.1)
    other.ask("gateway", 0.2)
    asked = leads_at(other, other.attempt(0.2, 0), "2", 0.2)
    assert (asked.holder_id, asked.beat) == ("a", record.beat), "the leader's renewals count alone"
    assert other.attempt(0.3, 0) is None
    assert leader.request is None
    leader.observed(asked, "2", 0.5)
    assert leader.request == asked
    given = leader.release("b:1")
    assert given is not None
    for candidate in (other, third):
        candidate.observed(given.record, "3", 0.6)
    assert third.attempt(0.7, 0) is None
    assert third.attempt(0.6 + LEASE_S, 0) is not None, "the other one may have died"
    leads_at(other, other.attempt(0.7, 0), "4", 0.7)
    assert other.leads(0.8)


def test_a_lease_that_is_refused_can_be_asked_for_again_later() -> None:
    leader, record = alone()
    other = Candidate("b", "b:1", LEASE_S)
    other.observed(record, "1", 0.0)
    other.ask("gateway", 0.0)
    leader.observed(leads_at(other, other.attempt(0.0, 0), "2", 0.0), "2", 0.1)
    leader.refuse()
    assert leader.request is None
    kept = leads_at(leader, leader.attempt(1.0, 0), "3", 1.0)
    assert (kept.asked_by, kept.asked_for) == ("", "")
    other.observed(kept, "3", 1.1)
    other.ask("gateway", 1.1)
    assert other.attempt(1.1, 0) is None, "so soon"
    kept = leads_at(leader, leader.attempt(3.0, 0), "4", 3.0)
    leads_at(leader, leader.attempt(5.0, 0), "5", 5.0)
    other.observed(kept, "5", ASK_EVERY_S)
    other.ask("gateway", ASK_EVERY_S)
    leader.observed(leads_at(other, other.attempt(ASK_EVERY_S, 0), "6", ASK_EVERY_S), "6", ASK_EVERY_S)
    assert leader.request is not None


def test_a_request_does_not_keep_the_lease_of_a_dead_leader() -> None:
    _, record = alone()
    other, third = Candidate("b", "b:1", LEASE_S), Candidate("c", "c:1", LEASE_S)
    for candidate in (other, third):
        candidate.observed(record, "1", 0.0)
    other.ask("gateway", 1.0)
    asked = leads_at(other, other.attempt(1.0, 0), "2", 1.0)
    third.observed(asked, "2", 1.1)
    assert third.attempt(LEASE_S - 0.1, 0) is None
    assert third.attempt(LEASE_S, 0) is not None


def test_a_store_that_was_emptied_does_not_begin_with_an_old_term() -> None:
    leader, record = alone()
    assert record.term == 7
    assert leader.term == 7


def test_a_leader_that_is_late_is_not_named() -> None:
    _, record = alone()
    other = Candidate("b", "b:1", LEASE_S)
    other.observed(record, "1", 0.0)
    assert other.leader(1.0) == "a:1"
    assert other.leader(2.0) == ""
