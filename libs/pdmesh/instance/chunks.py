"""Chunks of prompts, and the end of a prompt."""

from __future__ import annotations

from pdmesh.core.events import TransferOffered
from pdmesh.instance.floor import Floor
from pdmesh.instance.sequence import Sequence
from pdmesh.instance.sequence_phases import LeavingState
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.plans import ChunkPlan


class Chunks:
    """The prompts that one instance computes."""

    def __init__(self, floor: Floor) -> None:
        self._floor = floor

    def begin(self, sequence: Sequence) -> None:
        """Offer the KV of a prompt when its first chunk begins."""
        onward = sequence.onward
        if onward is not None and onward.state is LeavingState.WAITING:
            onward.offer()
            floor = self._floor
            floor.effects.append(TransferOffered(floor.instance_id, *sequence.key, onward.transfer_id))

    def end(self, sequence: Sequence, chunk: ChunkPlan) -> None:
        """Record a computed chunk, and cache the prompt up to its end."""
        num_tokens = chunk.start + chunk.num_tokens
        sequence.compute(num_tokens)
        self._floor.computed(sequence, num_tokens // GRANULE_TOKENS)

    def end_prompt(self, sequence: Sequence, *, ends: bool = False) -> None:
        """Record the first token. Decode here, unless the KV moves on or the generation ``ends``."""
        moves_on = sequence.moves_on
        sequence.end_prompt()
        if not moves_on and not ends:
            self._floor.decode(sequence)
