"""Lost ranges of contexts that are computed again here, one chunk in a step, in turn with planned steps."""

from __future__ import annotations

from collections import deque

from pdmesh.instance.sequence import Sequence
from pdmesh.plans import ChunkPlan

#: Tokens in a step. Shard holders answer one fp32 row for each: 128 rows of 32 heads of dimension 128 are 2 MiB.
CHUNK_TOKENS = 128


class LostRanges:
    """The ranges of one instance whose tokens have come, oldest first.

    ``is_plans_turn``: whether a range had the last step. ``_due`` has each range with the token number of its end.
    """

    def __init__(self) -> None:
        self._due: deque[tuple[Sequence, int]] = deque()
        self.is_plans_turn = False

    def begin(self, sequence: Sequence, first: int, end: int) -> None:
        """Compute the tokens from ``first`` to ``end`` from the next step on."""
        sequence.compute(first)
        self._due.append((sequence, end))

    @property
    def next(self) -> Sequence | None:
        """The range to compute next; None if there is none. Freed ranges are removed."""
        while self._due and self._due[0][0].is_freed:
            self._due.popleft()
        return self._due[0][0] if self._due else None

    def next_chunk(self) -> ChunkPlan:
        """Return the next chunk of the oldest lost range. Call only after `next` has returned a range."""
        sequence, end = self._due[0]
        start = sequence.prompt.num_computed_tokens
        request_id, epoch = sequence.key
        num_tokens = min(CHUNK_TOKENS, end - start)
        return ChunkPlan(request_id=request_id, epoch=epoch, start=start, num_tokens=num_tokens, is_last=False)

    def end_chunk(self, sequence: Sequence, chunk: ChunkPlan) -> bool:
        """Record a computed chunk, and return whether the range is complete."""
        sequence.compute(chunk.start + chunk.num_tokens)
        is_whole = chunk.start + chunk.num_tokens == self._due[0][1]
        if is_whole:
            self._due.popleft()
        return is_whole

    def clear(self) -> None:
        """Forget all ranges."""
        self._due.clear()
