"""Residents, the requests that decode on an instance: in which step each ends, needs more room, or has none left.

A resident draws a token in each of its steps. When its blocks are full, a resident pauses until it gets more blocks
(`pdmesh.core.copies.on_demand`). A report is made then, and earlier, when there is room for only a few more tokens. A
freed resident is in no step that begins afterwards. Steps are counted, not timed.
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
    """The final length of a request.

    ``num_total_tokens``: tokens of the prompt and of the whole output.
    ``num_output_tokens``: output tokens of all epochs.
    ``max_total_tokens``: most tokens whose KV the request may need; 0: unknown.
    ``chain``: cacheable granules of the prompt, and ``drawn`` the following ones that the output completes.
    """

    num_total_tokens: int
    num_output_tokens: int
    max_total_tokens: int
    chain: PrefixHashes = ()
    drawn: PrefixHashes = ()


@dataclass(slots=True, eq=False)
class _Resident:
    """A resident since it last joined.

    ``num_tokens``: tokens of prompt and output at the join; the KV of the last one is written next.
    ``num_saved_tokens``: tokens on other instances, which cost the steps here no time.
    ``joined_step``: number of steps made before the join; None while the resident is paused.
    ``num_entries``: number of entries in the heap, where only the last one counts.
    ``full_at_tokens``: least number of tokens with which the next range is complete here; 0: reported, or never.
    """

    key: RequestKey
    length: Length
    num_blocks: int
    num_tokens: int
    num_saved_tokens: int = 0
    joined_step: int | None = None
    num_entries: int = 0
    reports: RoomReports = field(default_factory=RoomReports)
    full_at_tokens: int = 0


class ResidentReports(NamedTuple):
    """Finished requests, and residents that need more room or hold more than a range, after some steps."""

    finished: list[RequestKey]
    low: tuple[ResidentContext, ...]


class Shares:
    """Shares of the residents in the planned steps of an instance with several stages.

    After ``num_parts`` ended steps, a *round*, every resident has been in one of them. With one stage, each step is a
    round.
    """

    def __init__(self, num_parts: int) -> None:
        self._num_parts = num_parts
        self._num_begun = self._num_ended = 0

    def begin(self, num_residents: int) -> int:
        """Begin a step, and return the number of residents in it."""
        self._num_begun += 1
        return self._size(num_residents, (self._num_begun - 1) % self._num_parts)

    def largest(self, num_residents: int) -> int:
        """Return the size of the largest share if ``num_residents`` are split evenly over the steps of a round."""
        return self._size(num_residents, 0)

    @property
    def ends_round(self) -> bool:
        """Whether the next end of a step ends a round."""
        return (self._num_ended + 1) % self._num_parts == 0

    @property
    def is_between_rounds(self) -> bool:
        """Whether no step of the current round has ended."""
        return self._num_ended % self._num_parts == 0

    def end(self) -> None:
        """End a step."""
        self._num_ended += 1

    def forget(self) -> None:
        """Begin a new round, because no step of the present one is running."""
        self._num_begun = self._num_ended = 0

    def _size(self, num_residents: int, part: int) -> int:
        return (num_residents + self._num_parts - 1 - part) // self._num_parts


class Residents:
    """The residents of one instance, in order of arrival.

    ``stood`` is called for each resident that is in no further step, with the number of its first step.
    ``num_context_tokens``: context of all decoding residents that costs steps here time.
    ``num_spread``: number of decoding residents with a part of the context on other instances.
    ``_joining`` and ``_leaving`` take effect before the next step. ``_leaving`` is True for a resident that continues
    on another instance, and False for a freed one.
    ``_due`` is a heap by step, order and number of the resident's entry.
    """

    def __init__(self, block_size: int, stood: Callable[[RequestKey, int], None]) -> None:
        self._block_size = block_size
        self._stood = stood
        self._all: dict[RequestKey, _Resident] = {}
        self._decoding: dict[RequestKey, _Resident] = {}
        self._joining: dict[RequestKey, _Resident] = {}
        self._leaving: dict[RequestKey, bool] = {}
        self._due: list[tuple[int, int, int, _Resident]] = []
        self._num_entries = 0
        self._num_steps = 0
        self.num_context_tokens = 0
        self.num_spread = 0

    def __len__(self) -> int:
        """Number of decoding residents. Joining and leaving take effect in `seat`."""
        return len(self._decoding)

    def __contains__(self, key: RequestKey) -> bool:
        """Whether a request joined, and has not left."""
        return key in self._all

    @property
    def steps_left(self) -> int:
        """Number of steps until a resident ends or needs a report. Valid only while a resident decodes."""
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
        """Add a request that decodes from the next step on.

        Other instances hold the first ``num_saved_tokens``, and attend to them at the same time. A report is due at
        ``full_at_tokens``.
        """
        assert num_tokens <= length.num_total_tokens, f"{key} has been drawn twice"
        resident = _Resident(key, length, num_blocks, num_tokens, num_saved_tokens, full_at_tokens=full_at_tokens)
        self._all[key] = self._joining[key] = resident

    def spread(self, key: RequestKey, num_saved_tokens: int, full_at_tokens: int) -> None:
        """Record how much of a resident's context other instances hold now."""
        resident = self._all[key]
        if resident.joined_step is not None:
            self.num_context_tokens += resident.num_saved_tokens - num_saved_tokens
            self.num_spread += (num_saved_tokens > 0) - (resident.num_saved_tokens > 0)
        resident.num_saved_tokens, resident.full_at_tokens = num_saved_tokens, full_at_tokens
        resident.reports.spread()
        if resident.joined_step is not None:
            self._expect(resident)

    def grow(self, key: RequestKey, num_blocks: int) -> bool:
        """Set a resident's number of blocks. Return whether it joins the next step: not if it decodes or is unknown."""
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
        """Let a resident leave for another instance before the next step, unless it ends with the running step."""
        self._leaving.setdefault(key, True)

    def stay(self, key: RequestKey) -> None:
        """Cancel the leaving of a resident."""
        self._leaving.pop(key, None)

    def end(self, key: RequestKey) -> None:
        """Let a resident leave at once: its generation ended with the last step."""
        self._joining.pop(key, None)
        self._leaving.pop(key, None)
        self._stand(self._all.pop(key))

    def num_tokens(self, key: RequestKey) -> int:
        """Return the tokens of prompt and output of a resident, up to the last reported step."""
        resident = self._all[key]
        return resident.num_tokens + self._num_made(resident)

    def joined_step(self, key: RequestKey) -> int | None:
        """Return the number of a resident's first step since it joined; None while it is paused."""
        return self._all[key].joined_step

    def staying(self) -> Iterator[RequestKey]:
        """Iterate over the residents that were not freed."""
        return (key for key in self._all if self._leaving.get(key, True))

    def seat(self) -> list[tuple[RequestKey, int]]:
        """Let residents join and leave, between two steps; return the leaving ones with their numbers of tokens."""
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

    def decoded(self, num_steps: int) -> ResidentReports:
        """Record ``num_steps`` made steps, at most `steps_left`, and return the residents that ended or are low."""
        self._num_steps += num_steps
        self.num_context_tokens += num_steps * len(self._decoding)
        told = ResidentReports([], ())
        while self._due and self._due[0][0] <= self._num_steps:
            _, _, number, resident = heappop(self._due)
            if number != resident.num_entries or resident.joined_step is None:
                continue
            if self._leaving.get(resident.key) is False:
                continue
            told = self._look_at(resident, told)
        return told

    def _look_at(self, resident: _Resident, told: ResidentReports) -> ResidentReports:
        """Return ``told`` with a resident added if it ends or needs a report; schedule its next look."""
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
        """Return the number of steps since a resident last joined; 0 while the resident is paused."""
        return 0 if resident.joined_step is None else self._num_steps - resident.joined_step

    def _stand(self, resident: _Resident) -> None:
        """Pause a resident and call ``stood``, except for a freed resident, whose tokens are discarded."""
        joined_step = resident.joined_step
        if self._decoding.pop(resident.key, None) is None or joined_step is None:
            return
        num_made = self._num_steps - joined_step
        self.num_context_tokens -= resident.num_tokens - resident.num_saved_tokens + num_made
        self.num_spread -= resident.num_saved_tokens > 0
        if self._leaving.get(resident.key, True):
            self._stood(resident.key, joined_step)
        resident.num_tokens += num_made
        resident.joined_step = None

    def _expect(self, resident: _Resident) -> None:
        """Schedule the step after which a resident ends or needs a report. The room is negative if it has none."""
        joined_step, length = resident.joined_step, resident.length
        assert joined_step is not None
        num_left = length.num_total_tokens - resident.num_tokens
        room = resident.num_blocks * self._block_size - resident.num_tokens
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
