"""Residents, the requests that decode on an instance: in which step each ends, needs more room, or has none left.

A resident draws a token in every step that it takes part in. A resident whose tokens fill its blocks pauses until it
gets more (`pdmesh.core.copies.on_demand`). It is reported then, and earlier, when it has room for few more tokens. A
freed resident takes part in no step that begins afterwards. Steps are counted, not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from pdmesh.instance.room import RoomReports
from pdmesh.model import PrefixHashes, RequestKey
from pdmesh.plans import ResidentContext
from pdmesh.policy.on_demand import LOW_TOKENS


class Length(NamedTuple):
    """How long a request gets."""

    num_total_tokens: int  # of its prompt and all that it will draw
    num_output_tokens: int  # that it will have drawn in all epochs
    max_total_tokens: int  # whose KV it may come to hold; 0: not known
    chain: PrefixHashes = ()  # granules of its prompt that are kept for others
    drawn: PrefixHashes = ()  # and those behind them that what it draws completes


@dataclass(slots=True, eq=False)
class _Resident:
    key: RequestKey
    length: Length
    num_blocks: int
    num_tokens: int  # when it joined: of its prompt and drawn; the last one's KV is written next
    num_saved_tokens: int = 0  # of these, that no step here takes time for
    joined_step: int | None = None  # of those made so far; None while it stands still
    num_entries: int = 0  # in the heap, of which the last one counts
    reports: RoomReports = field(default_factory=RoomReports)
    full_at_tokens: int = 0  # from so many on its first range here is full; 0: that was said, or there are none


class Told(NamedTuple):
    """What steps led to."""

    finished: list[RequestKey]
    low: tuple[ResidentContext, ...]  # need more room soon, or at once, or hold more than a range


class Shares:
    """How residents are dealt out over the planned steps of an instance of several stages: each has one of the parts.

    When as many have ended as there are parts, a *round*, every resident has been in one. Of one stage, each step is.
    """

    def __init__(self, num_parts: int) -> None:
        self._num_parts = num_parts
        self._num_begun = self._num_ended = 0

    def begin(self, num_residents: int) -> int:
        """A step begins. Return how many of the residents it has."""
        self._num_begun += 1
        return self._size(num_residents, (self._num_begun - 1) % self._num_parts)

    def largest(self, num_residents: int) -> int:
        """Return how many residents the largest part has."""
        return self._size(num_residents, 0)

    @property
    def ends_round(self) -> bool:
        """Whether the next step that ends ends a round."""
        return (self._num_ended + 1) % self._num_parts == 0

    @property
    def is_between_rounds(self) -> bool:
        """Whether no part of a round has ended."""
        return self._num_ended % self._num_parts == 0

    def end(self) -> None:
        """A step ends."""
        self._num_ended += 1

    def forget(self) -> None:
        """Steps that have begun will not end."""
        self._num_begun = self._num_ended

    def _size(self, num_residents: int, part: int) -> int:
        return (num_residents + self._num_parts - 1 - part) // self._num_parts


class Residents:
    """The residents of one instance, in order of arrival.

    ``stood`` is told of each that takes part in no step any more, with the number of the first step that it was in.
    """

    def __init__(self, block_size: int, stood: Callable[[RequestKey, int], None]) -> None:
        self._block_size = block_size
        self._stood = stood
        self._all: dict[RequestKey, _Resident] = {}
        self._decoding: dict[RequestKey, _Resident] = {}
        self._joining: dict[RequestKey, _Resident] = {}  # from the next step on
        self._leaving: dict[RequestKey, bool] = {}  # the same; whether it goes on elsewhere with what it draws here
        self._due: list[tuple[int, int, int, _Resident]] = []  # by step, order, number of the entry
        self._num_entries = 0
        self._num_steps = 0  # with decodes
        self.num_context_tokens = 0  # of all that decode, that steps take time for
        self.num_spread = 0  # of these, whose context others hold some of

    def __len__(self) -> int:
        """Number of residents that decode in the next step."""
        return len(self._decoding)

    def __contains__(self, key: RequestKey) -> bool:
        """Whether a request joined, and has not left."""
        return key in self._all

    @property
    def steps_left(self) -> int:
        """Steps until something is due. Only while a resident decodes."""
        self._drop_old_entries()
        return self._due[0][0] - self._num_steps

    def join(
        self,
        key: RequestKey,
        length: Length,
        num_tokens: int,
        num_blocks: int,
        *,
        num_saved_tokens: int = 0,
        full_at_tokens: int = 0,
    ) -> None:
        """Add a request whose KV is here, in so many blocks; it decodes from the next step on.

        Others hold some of it, and read it at the same time, if there are ``num_saved_tokens``. It is said when it has
        ``full_at_tokens``.
        """
        assert num_tokens <= length.num_total_tokens, f"{key} has been drawn twice"
        resident = _Resident(key, length, num_blocks, num_tokens, num_saved_tokens, full_at_tokens=full_at_tokens)
        self._all[key] = self._joining[key] = resident

    def spread(self, key: RequestKey, num_saved_tokens: int, full_at_tokens: int) -> None:
        """Note that others hold more of a resident's context, or otherwise than before."""
        resident = self._all[key]
        if resident.joined_step is not None:
            self.num_context_tokens += resident.num_saved_tokens - num_saved_tokens
            self.num_spread += (num_saved_tokens > 0) - (resident.num_saved_tokens > 0)
        resident.num_saved_tokens, resident.full_at_tokens = num_saved_tokens, full_at_tokens
        resident.reports.spread()
        if resident.joined_step is not None:
            self._expect(resident)

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

    def free(self, key: RequestKey) -> None:
        """Let a resident leave before the next step; `seat` returns it."""
        self._leaving[key] = False

    def leave(self, key: RequestKey) -> None:
        """The same of one that goes on elsewhere, unless it ends with the step that is being made."""
        self._leaving.setdefault(key, True)

    def stay(self, key: RequestKey) -> None:
        """One that was to go on elsewhere does not leave after all."""
        self._leaving.pop(key, None)

    def end(self, key: RequestKey) -> None:
        """Let a resident leave at once: its generation ended with the last step."""
        self._joining.pop(key, None)
        self._leaving.pop(key, None)
        self._stand(self._all.pop(key))

    def num_tokens(self, key: RequestKey) -> int:
        """Return tokens of prompt and output up to the last reported step, of one that has not left."""
        resident = self._all[key]
        return resident.num_tokens + self._num_made(resident)

    def joined_step(self, key: RequestKey) -> int | None:
        """Return the number of the first step that it takes part in; None while it stands still."""
        return self._all[key].joined_step

    def staying(self) -> Iterator[RequestKey]:
        """Return those that were not freed."""
        return (key for key in self._all if self._leaving.get(key, True))

    def seat(self) -> list[tuple[RequestKey, int]]:
        """Seat residents that joined, between two steps, and return those that left, each with its tokens."""
        left: list[tuple[RequestKey, int]] = []
        for key in self._leaving:
            self._joining.pop(key, None)
            resident = self._all.pop(key)
            self._stand(resident)
            left.append((key, resident.num_tokens))
        self._leaving.clear()
        for key, resident in self._joining.items():
            resident.joined_step = self._num_steps
            self._decoding[key] = resident
            self.num_context_tokens += resident.num_tokens - resident.num_saved_tokens
            self.num_spread += resident.num_saved_tokens > 0
            self._expect(resident)
        self._joining.clear()
        return left

    def decoded(self, num_steps: int) -> Told:
        """So many steps were made: no more than `steps_left`."""
        self._num_steps += num_steps
        self.num_context_tokens += num_steps * len(self._decoding)
        told = Told([], ())
        while self._due and self._due[0][0] <= self._num_steps:
            _, _, number, resident = heappop(self._due)
            if number != resident.num_entries or resident.joined_step is None:
                continue
            if self._leaving.get(resident.key) is False:
                continue
            told = self._look_at(resident, told)
        return told

    def _look_at(self, resident: _Resident, told: Told) -> Told:
        """Note whether a resident ends, or needs more blocks."""
        key = resident.key
        num_tokens = resident.num_tokens + self._num_made(resident)
        if num_tokens == resident.length.num_total_tokens:
            self._stand(resident)
            del self._all[key]
            self._leaving.pop(key, None)
            told.finished.append(key)
            return told
        room = resident.num_blocks * self._block_size - num_tokens
        is_full = 0 < resident.full_at_tokens <= num_tokens
        resident.full_at_tokens *= not is_full
        is_low = self._is_low(resident, room)
        is_news = resident.reports.note(resident.num_blocks, room, is_low=is_low, is_full=is_full)
        if room < 0:
            self._stand(resident)
        else:
            self._expect(resident)
        if not is_news:
            return told
        context = ResidentContext(request_id=key[0], epoch=key[1], num_tokens=num_tokens)
        return told._replace(low=(*told.low, context))

    def _is_low(self, resident: _Resident, room: int) -> bool:
        return room < LOW_TOKENS and resident.num_blocks * self._block_size < resident.length.max_total_tokens

    def _num_made(self, resident: _Resident) -> int:
        """Steps since it joined."""
        return 0 if resident.joined_step is None else self._num_steps - resident.joined_step

    def _stand(self, resident: _Resident) -> None:
        """Let a resident stand still: it takes part in no step any more."""
        joined_step = resident.joined_step
        if self._decoding.pop(resident.key, None) is None or joined_step is None:
            return
        num_made = self._num_steps - joined_step
        self.num_context_tokens -= resident.num_tokens - resident.num_saved_tokens + num_made
        self.num_spread -= resident.num_saved_tokens > 0
        if self._leaving.get(resident.key, True):  # else what it drew was taken from it
            self._stood(resident.key, joined_step)
        resident.num_tokens += num_made
        resident.joined_step = None

    def _expect(self, resident: _Resident) -> None:
        """Note the step after which something is to be done about it."""
        joined_step, length = resident.joined_step, resident.length
        assert joined_step is not None
        num_left = length.num_total_tokens - resident.num_tokens
        room = resident.num_blocks * self._block_size - resident.num_tokens  # negative: it has none
        if resident.num_blocks * self._block_size < length.max_total_tokens:
            num_left = min(num_left, room + 1)
            if resident.reports.low_at_blocks != resident.num_blocks:
                num_left = min(num_left, max(room - LOW_TOKENS + 1, self._num_made(resident) + 1))
        if resident.full_at_tokens:
            num_left = min(num_left, max(resident.full_at_tokens - resident.num_tokens, self._num_made(resident) + 1))
        resident.num_entries += 1
        self._num_entries += 1
        heappush(self._due, (joined_step + num_left, self._num_entries, resident.num_entries, resident))

    def _drop_old_entries(self) -> None:
        while self._due[0][2] != self._due[0][3].num_entries or self._due[0][3].joined_step is None:
            heappop(self._due)
