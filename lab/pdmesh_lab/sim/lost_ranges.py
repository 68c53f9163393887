"""Ranges of spread contexts that were lost, and are computed again on a simulated instance, a chunk in a step.

As `pdmesh.worker.lost_ranges` does it: beside the decodes that are there, in turn with planned steps. Those that hold
ranges before attend to them at the same time, so a chunk takes as long as one behind a whole range.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdmesh.instance.sequence import Sequence
from pdmesh.model import RequestKey
from pdmesh.plans import ChunkPlan
from pdmesh.policy.latency import ChunkShape

#: As `pdmesh.worker.lost_ranges.CHUNK_TOKENS`.
CHUNK_TOKENS = 128


@dataclass(slots=True, eq=False)
class _Range:
    sequence: Sequence
    first: int  # token
    num_computed: int = 0


class SimulatedLostRanges:
    """Those whose tokens have come, oldest first. ``range_tokens`` each."""

    def __init__(self, range_tokens: int) -> None:
        self._range_tokens = range_tokens
        self._due: list[_Range] = []
        self.is_plans_turn = False  # a range had the last step

    def __len__(self) -> int:
        return len(self._due)

    def begin(self, sequence: Sequence) -> None:
        assert sequence.part is not None, f"{sequence.key} is no range"
        self._due.append(_Range(sequence, sequence.part * self._range_tokens))

    def forget(self, key: RequestKey) -> None:
        """Compute no more of it."""
        self._due = [each for each in self._due if each.sequence.key != key]

    def clear(self) -> None:
        """The instance is no more."""
        self._due.clear()

    def next_chunk(self) -> tuple[ChunkPlan, ChunkShape]:
        """Return what the next step computes, and what that takes."""
        due, size = self._due[0], self._range_tokens
        num_tokens = min(CHUNK_TOKENS, size - due.num_computed)
        request_id, epoch = due.sequence.key
        plan = ChunkPlan(
            request_id=request_id,
            epoch=epoch,
            start=due.first + due.num_computed,
            num_tokens=num_tokens,
            is_last=False,
        )
        return plan, ChunkShape(num_tokens, size if due.first else due.num_computed)

    def computed(self, chunk: ChunkPlan) -> Sequence | None:
        """Note that a step has computed this; return what is whole with it."""
        if not self._due or self._due[0].sequence.key != (chunk.request_id, chunk.epoch):
            return None  # it was freed meanwhile
        due = self._due[0]
        due.num_computed += chunk.num_tokens
        return self._due.pop(0).sequence if due.num_computed == self._range_tokens else None
