"""Who decodes on a modelled instance: in which step each resident ends, needs more room, or has none left.

Residents draw a token each in every step that they take part in. A resident whose tokens fill its blocks stands still
until it is granted more (`pdmesh.core.instances.on_demand`); it says so, as a worker does, and before, when it has room
for little more. Who was freed takes part in no step that begins afterwards.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from pdmesh.model import Request, RequestKey
from pdmesh.plans import ResidentContext
from pdmesh.policy.on_demand import LOW_TOKENS
from pdmesh.sim.result import RequestRun


@dataclass(slots=True, eq=False)
class _Resident:
    """One epoch of a request; the run may be in a later one before it leaves."""

    run: RequestRun
    request: Request
    num_blocks: int
    num_tokens: int  # when it joined: of its prompt and drawn; the last one's KV is written next
    joined_step: int | None = None  # of those made so far; None while it stands still
    num_entries: int = 0  # in the heap, of which the last one counts
    low_at_blocks: int = 0  # with how many blocks it was last said to have room for little more
    out_at_blocks: int = 0  # and for nothing more

    @property
    def key(self) -> RequestKey:
        return self.request.request_id, self.request.epoch

    @property
    def num_total_tokens(self) -> int:
        """Number of tokens of its prompt and of all that it will draw."""
        return self.run.request.num_prompt_tokens + self.run.num_output_tokens

    @property
    def is_over(self) -> bool:
        """Whether it has been resumed in a later epoch, with what it had drawn by then; word of that may be late."""
        return self.run.current is not self.request


class Told(NamedTuple):
    """What steps led to."""

    finished: list[RequestRun]
    low: tuple[ResidentContext, ...]  # need more room soon, or at once


class Residents:
    """The residents of one instance, in order of arrival."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._all: dict[RequestKey, _Resident] = {}
        self._decoding: dict[RequestKey, _Resident] = {}
        self._joining: dict[RequestKey, _Resident] = {}  # from the next step on
        self._leaving: dict[RequestKey, bool] = {}  # the same; whether it goes on elsewhere with what it draws here
        self._due: list[tuple[int, int, int, _Resident]] = []  # by step, order, number of the entry
        self._num_entries = 0
        self._ends_s = array("d")  # of every step with decodes; a resident's token times are a slice of it
        self.num_context_tokens = 0  # of all that decode

    def __len__(self) -> int:
        """Number of residents that decode in the next step."""
        return len(self._decoding)

    @property
    def steps_left(self) -> int:
        """Steps until something is due. Only while a resident decodes."""
        self._drop_old_entries()
        return self._due[0][0] - len(self._ends_s)

    def join(self, run: RequestRun, num_blocks: int) -> None:
        """Add a request whose KV is here, in so many blocks; it decodes from the next step on."""
        num_tokens = run.request.num_prompt_tokens + len(run.token_times_s)
        resident = _Resident(run, run.current, num_blocks, num_tokens)
        assert num_tokens <= resident.num_total_tokens, f"{run.request.request_id} has been drawn twice"
        self._all[resident.key] = self._joining[resident.key] = resident

    def grow(self, key: RequestKey, num_blocks: int) -> bool:
        """Set a resident's number of blocks. Whether it can go on now, and could not before."""
        resident = self._all.get(key)
        if resident is None:
            return False
        resident.num_blocks = num_blocks
        if resident.joined_step is not None:
            self._expect(resident)
            return False
        self._joining[key] = resident
        return True

    def free(self, key: RequestKey) -> bool:
        """Let a resident leave before the next step; `seat` returns it. False if it does not decode here."""
        if key not in self._all:
            return False
        self._leaving[key] = False
        return True

    def leave(self, key: RequestKey) -> None:
        """The same of one that goes on elsewhere, unless it ends with the step that is being made."""
        self._leaving.setdefault(key, True)

    def num_tokens(self, key: RequestKey) -> int | None:
        """Return tokens of prompt and output up to the last reported step; None if it does not decode here."""
        resident = self._all.get(key)
        return None if resident is None else resident.num_tokens + self._num_made(resident)

    def seat(self) -> list[RequestKey]:
        """Seat residents that joined, between two steps, and return those that were freed."""
        left = list(self._leaving)
        for key in left:
            self._joining.pop(key, None)
            self._stand(self._all.pop(key))
        self._leaving.clear()
        for key, resident in self._joining.items():
            resident.joined_step = len(self._ends_s)
            self._decoding[key] = resident
            self.num_context_tokens += resident.num_tokens
            self._expect(resident)
        self._joining.clear()
        return left

    def decoded(self, ends_s: Sequence[float]) -> Told:
        """Steps were made, that ended then: no more than `steps_left` of them."""
        self._ends_s.extend(ends_s)
        self.num_context_tokens += len(ends_s) * len(self._decoding)
        told = Told([], ())
        while self._due and self._due[0][0] <= len(self._ends_s):
            _, _, number, resident = heappop(self._due)
            if number != resident.num_entries or resident.joined_step is None:
                continue
            if self._leaving.get(resident.key) is False:
                continue
            told = self._look_at(resident, told)
        return told

    def _look_at(self, resident: _Resident, told: Told) -> Told:
        """Note whether a resident ends, or needs more blocks."""
        key, run = resident.key, resident.run
        num_tokens = resident.num_tokens + self._num_made(resident)
        if num_tokens == resident.num_total_tokens:
            self._stand(resident)
            del self._all[key]
            self._leaving.pop(key, None)
            told.finished.append(run)
            return told
        is_out = num_tokens > resident.num_blocks * self._block_size
        if is_out:
            self._stand(resident)
            is_news, resident.out_at_blocks = resident.out_at_blocks != resident.num_blocks, resident.num_blocks
        else:
            is_news, resident.low_at_blocks = resident.low_at_blocks != resident.num_blocks, resident.num_blocks
            self._expect(resident)
        if not is_news:
            return told
        context = ResidentContext(request_id=key[0], epoch=key[1], num_tokens=num_tokens)
        return told._replace(low=(*told.low, context))

    def drawn_s(self, key: RequestKey, now_s: float, running_s: Sequence[float]) -> Sequence[float]:
        """Return the times of a resident's tokens up to now; ``running_s`` are the ends of the steps under way."""
        resident = self._all[key]
        times_s = [*resident.run.token_times_s]
        if resident.joined_step is not None:
            times_s += self._ends_s[resident.joined_step :]
            times_s += running_s[: bisect_right(running_s, now_s)]
        return times_s

    def end(self, now_s: float, running_s: Sequence[float]) -> None:
        """All that is here is lost: what was drawn of it up to now has left."""
        for key, resident in self._all.items():
            if self._leaving.get(key, True) and not resident.is_over:  # else what it drew was taken from it
                resident.run.token_times_s = self.drawn_s(key, now_s, running_s)
        self._all.clear()

    def stay(self, key: RequestKey) -> bool:
        """One that was to go on elsewhere does not leave after all. False if it has left."""
        self._leaving.pop(key, None)
        return key in self._all

    def _num_made(self, resident: _Resident) -> int:
        """Steps since it joined."""
        return 0 if resident.joined_step is None else len(self._ends_s) - resident.joined_step

    def _stand(self, resident: _Resident) -> None:
        """Let a resident stand still: it takes part in no step any more."""
        if self._decoding.pop(resident.key, None) is None:
            return
        num_made = self._num_made(resident)
        self.num_context_tokens -= resident.num_tokens + num_made
        if self._leaving.get(resident.key, True) and not resident.is_over:  # else what it drew was taken from it
            run, joined_step = resident.run, resident.joined_step
            run.token_times_s = array("d", [*run.token_times_s, *self._ends_s[joined_step:]])
        resident.num_tokens += num_made
        resident.joined_step = None

    def _expect(self, resident: _Resident) -> None:
        """Note the step after which something is to be done about it."""
        joined_step = resident.joined_step
        assert joined_step is not None
        num_left = resident.num_total_tokens - resident.num_tokens
        room = resident.num_blocks * self._block_size - resident.num_tokens  # negative: it has none
        if resident.num_blocks * self._block_size < resident.request.max_total_tokens:
            num_left = min(num_left, room + 1)
            if resident.low_at_blocks != resident.num_blocks:
                num_left = min(num_left, max(room - LOW_TOKENS + 1, self._num_made(resident) + 1))
        resident.num_entries += 1
        self._num_entries += 1
        heappush(self._due, (joined_step + num_left, self._num_entries, resident.num_entries, resident))

    def _drop_old_entries(self) -> None:
        while self._due[0][2] != self._due[0][3].num_entries or self._due[0][3].joined_step is None:
            heappop(self._due)
