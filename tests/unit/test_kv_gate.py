"""Waiting for KV pages loses no wake-up, whatever the order in which threads get their turns.

Threads run one at a time: each stops before every line of `pdmesh.kv.gate` that it executes, and at the lock, until
a schedule gives it the next turn. All schedules with up to two preemptions are tried, and others at random.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.kv import gate as module
from pdmesh.kv.gate import GroupGate, Progress, Urgent, Wakeup
from pdmesh.kv.ledger import PageLedger
from pdmesh.kv.offload.copies import KvLoad
from pdmesh.kv.pages import Blocks
from pdmesh_testing.examples import examples

NOTHING = Urgent(lambda: False, lambda: None)
LIMIT_S = 1000.0
SOURCE = module.__file__


class Pages:
    """A ledger, and a gate before its pages."""

    def __init__(
        self, wakeup: Wakeup, *, num_layers: int, num_blocks: int, no_progress_s: float, clock: Callable[[], float]
    ) -> None:
        self.ledger = PageLedger(num_layers, num_blocks)
        self.gate = GroupGate(wakeup, self.ledger, no_progress_s=no_progress_s, clock=clock)

    def write(self, layer: int, first_block: int, num_blocks: int) -> None:
        """Of the engine's thread."""
        self.ledger.write(Blocks(0, layer, first_block, num_blocks))

    def add(self, layer: int, first_block: int, num_blocks: int) -> None:
        """Of the event loop."""
        self.ledger.place(Blocks(0, layer, first_block, num_blocks))


class Stuck(Exception):
    """Nobody can go on, and somebody has not come to an end."""


class Turns:
    """Threads that take turns; ``choose`` picks who goes next of those who can (the first is who goes on)."""

    def __init__(self, choose: Callable[[int], int]) -> None:
        self._choose = choose
        self._wakes: list[threading.Semaphore] = []
        self._can_go: list[Callable[[], bool]] = []
        self._done = threading.Semaphore(0)
        self._errors: list[BaseException] = []
        self._ended: list[bool] = []
        self._aborting = False
        self.current = 0

    def run(self, programs: Sequence[Callable[[], object]]) -> None:
        """Raises Stuck, or what a program raised."""
        threads = [threading.Thread(target=self._thread, args=(i, p), daemon=True) for i, p in enumerate(programs)]
        for _ in programs:
            self._wakes.append(threading.Semaphore(0))
            self._can_go.append(lambda: True)
            self._ended.append(False)
        for thread in threads:
            thread.start()
        self._pass_on()
        self._done.acquire()
        for wake in self._wakes:
            wake.release()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
        if self._errors:
            raise self._errors[0]

    def stop(self, can_go: Callable[[], bool] = lambda: True) -> None:
        """Let others go first, perhaps, until ``can_go``."""
        me = self.current
        self._can_go[me] = can_go
        self._pass_on()
        self._wakes[me].acquire()
        if self._aborting:
            raise SystemExit

    def _pass_on(self) -> None:
        able = [i for i, ended in enumerate(self._ended) if not ended and self._can_go[i]()]
        able.sort(key=lambda i: i != self.current)
        if not able:
            if not all(self._ended) and not self._errors:
                self._errors.append(Stuck())
            self._aborting = True
            self._done.release()
            return
        self.current = able[self._choose(len(able)) if len(able) > 1 else 0]
        self._wakes[self.current].release()

    def _thread(self, number: int, program: Callable[[], object]) -> None:
        self._wakes[number].acquire()
        if self._aborting:
            return
        sys.settrace(self._trace)
        try:
            program()
        except SystemExit:
            return
        except BaseException as error:
            self._errors.append(error)
        finally:
            sys.settrace(None)
            self._ended[number] = True
        self._pass_on()

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != SOURCE:
            return None
        if event == "line":
            self.stop()
        return self._trace


class TurnedWakeup(Wakeup):
    """A wakeup whose lock and sleep are turns."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._depth = 0
        self._owner: int | None = None
        self._is_rung = False

    @property
    def lock(self) -> Any:
        return self

    def __enter__(self) -> None:
        me = self._turns.current
        if self._owner != me:
            self._turns.stop(lambda: self._owner is None)
            self._owner = me
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = None

    def ring(self) -> None:
        with self:
            self._is_rung = True

    def wait_for(self, condition: Callable[[], bool], limit_s: float) -> bool:
        with self:
            while not condition():
                me, depth = self._owner, self._depth
                self._is_rung, self._owner, self._depth = False, None, 0
                self._turns.stop(lambda: self._is_rung and self._owner is None)
                self._owner, self._depth = me, depth
        return True


class CarelessWakeup(TurnedWakeup):
    """It looks before it takes the lock, and sleeps without looking again."""

    def wait_for(self, condition: Callable[[], bool], limit_s: float) -> bool:
        with self:
            if condition():
                return True
            depth, self._owner, self._depth = self._depth, None, 0
            self._turns.stop(lambda: self._owner is None)
            self._is_rung = False
            self._turns.stop(lambda: self._is_rung and self._owner is None)
            self._owner, self._depth = 0, depth
        return True


def waits_for_pages(turns: Turns, wakeup: Wakeup) -> list[Callable[[], object]]:
    """Two layers' pages come from two threads, urgent work in between."""
    here = Pages(wakeup, num_layers=2, num_blocks=3, no_progress_s=LIMIT_S, clock=lambda: 0.0)
    inbox: list[str] = []
    done: list[str] = []
    urgent = Urgent(lambda: bool(inbox), lambda: done.append(inbox.pop()))

    def engine() -> None:
        for layer in range(2):
            here.write(layer, 2, 1)
            assert here.gate.wait(layer, 2, urgent)
            assert here.ledger.has_first(layer, 3)

    def loop() -> None:
        here.add(1, 0, 2)
        here.add(0, 1, 1)

    def other() -> None:
        inbox.append("a prompt")
        turns.stop()
        wakeup.ring()
        here.add(0, 0, 1)

    return [engine, loop, other]


def is_aborted(turns: Turns, wakeup: Wakeup) -> list[Callable[[], object]]:
    here = Pages(wakeup, num_layers=1, num_blocks=2, no_progress_s=LIMIT_S, clock=lambda: 0.0)

    def engine() -> None:
        assert not here.gate.wait(0, 2, NOTHING)
        assert here.gate.aborted == "freed"
        assert not here.gate.wait(0, 1, NOTHING)

    def loop() -> None:
        here.add(0, 0, 1)
        here.gate.abort("freed")
        here.gate.abort("later")

    return [engine, loop]


def waits_for_urgent_work_only(turns: Turns, wakeup: Wakeup) -> list[Callable[[], object]]:
    """What was urgent ends the waiting, as when it frees the request."""
    here = Pages(wakeup, num_layers=1, num_blocks=1, no_progress_s=LIMIT_S, clock=lambda: 0.0)
    inbox: list[None] = []

    def run() -> None:
        inbox.pop()
        here.gate.abort("done")

    def engine() -> None:
        assert not here.gate.wait(0, 1, Urgent(lambda: bool(inbox), run))

    def scheduler() -> None:
        inbox.append(None)
        turns.stop()
        wakeup.ring()

    return [engine, scheduler]


def waits_for_a_load(turns: Turns, wakeup: Wakeup) -> list[Callable[[], object]]:
    """Two layers come from the offload tier; then nothing more does."""
    load = KvLoad(wakeup, Progress(lambda: 0.0), lambda load: None, no_progress_s=LIMIT_S)

    def engine() -> None:
        load.wait(0, 1, NOTHING)  # unless it is aborted by then
        assert not load.wait(2, 1, NOTHING)
        assert load.aborted == "damaged"

    def loader() -> None:
        load.loaded(1)
        load.loaded(2)
        load.abort("damaged")
        assert not load.write(lambda: None)

    return [engine, loader]


Scenario = Callable[[Turns, Wakeup], Sequence[Callable[[], object]]]
SCENARIOS: list[Scenario] = [waits_for_pages, is_aborted, waits_for_urgent_work_only, waits_for_a_load]


def schedules(max_preemptions: int, run: Callable[[Callable[[int], int]], None]) -> Iterator[None]:
    """Run every schedule that leaves who would go on at most so many times."""
    pending: list[dict[int, int]] = [{}]
    while pending:
        preemptions = pending.pop()
        sizes: list[int] = []

        def choose(size: int, preemptions: dict[int, int] = preemptions, sizes: list[int] = sizes) -> int:
            sizes.append(size)
            return min(preemptions.get(len(sizes) - 1, 0), size - 1)

        run(choose)
        yield
        if len(preemptions) < max_preemptions:
            after = max(preemptions, default=-1)
            pending += [
                {**preemptions, at: other} for at in range(after + 1, len(sizes)) for other in range(1, sizes[at])
            ]


def explore(scenario: Scenario, wakeup: type[TurnedWakeup], max_preemptions: int) -> int:
    """How many schedules there were."""

    def run(choose: Callable[[int], int]) -> None:
        turns = Turns(choose)
        turns.run(scenario(turns, wakeup(turns)))

    return sum(1 for _ in schedules(max_preemptions, run))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_no_schedule_loses_a_wake_up(scenario: Scenario) -> None:
    assert explore(scenario, TurnedWakeup, 1 if scenario is waits_for_pages else 2) > 40


def test_a_lost_wake_up_would_be_found() -> None:
    with pytest.raises(Stuck):
        explore(is_aborted, CarelessWakeup, 2)


@settings(max_examples=examples(150))
@given(st.sampled_from(SCENARIOS), st.randoms(use_true_random=False))
def test_no_random_schedule_loses_a_wake_up(scenario: Scenario, random: Any) -> None:
    turns = Turns(random.randrange)
    turns.run(scenario(turns, TurnedWakeup(turns)))


def test_pages_may_come_in_any_order() -> None:
    here = Pages(Wakeup(), num_layers=2, num_blocks=5, no_progress_s=LIMIT_S, clock=lambda: 0.0)
    for first, count in ((3, 2), (1, 1), (0, 1)):
        assert not here.ledger.has_first(1, 3)
        here.add(1, first, count)
    assert here.ledger.has_first(1, 2)
    assert not here.ledger.has_first(1, 3)
    here.add(1, 2, 1)
    assert here.ledger.has_first(1, 5)
    assert not here.ledger.has_first(0, 1)
    assert here.gate.wait(1, 5, NOTHING)


def test_waiting_ends_itself_when_nothing_comes() -> None:
    now = iter(range(1000))
    here = Pages(Wakeup(), num_layers=1, num_blocks=1, no_progress_s=0.02, clock=lambda: next(now) / 100)
    assert not here.gate.wait(0, 1, NOTHING)
    assert here.gate.aborted == "no KV came from other members of the group for 0.02 s"
