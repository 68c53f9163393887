"""The leader's forward pass: it sends each step to the other ranks, and then computes its own part."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from pdmesh.engine.attention import QuerySpan
from pdmesh.engine.base import EngineSequence, LayerHook, SequenceSlice
from pdmesh.engine.forward import Forward, Rows, StepOutput
from pdmesh.engine.ranks.group import RankGroup
from pdmesh.engine.ranks.rank_commands import Abandon, Command, Deltas, EndStep, Go, Ready, Score
from pdmesh.engine.ranks.rank_elsewhere import AskedRows, ElsewhereOfRanks


class Followers(Protocol):
    """The other ranks, as the leader's engine sees them. Calls raise InstanceUnavailable if one is gone."""

    @property
    def group(self) -> RankGroup:
        """Exchange with the other ranks."""
        ...

    def tell(self, command: Command) -> None:
        """Send a command to each of the other ranks."""
        ...

    def open_cache(self, num_bytes: int, num_blocks: int, num_frames: int | None) -> Tensor:
        """Return the bytes of the KV cache, zeros that all ranks share, and have each rank map it."""
        ...

    def check_ready(self, leader: Ready) -> None:
        """Wait until all ranks can compute.

        Raise ConfigError if one cannot, has another arithmetic class than the leader, or loaded other weights.
        """
        ...


class LeadingForward:
    """`Forward` of all ranks, on top of the leader's own.

    In a step with a hook, the ranks meet in each layer after all have written its KV. Only then may the KV be sent.
    Only the leader knows whether another step inside this one, or the end of this one, is next.
    """

    def __init__(self, own: Forward, followers: Followers, asked: AskedRows, *, block_size: int) -> None:
        self._own = own
        self._asked = asked
        self._followers = followers
        self._block_size = block_size
        self._deltas = Deltas()

    @contextlib.contextmanager
    def step(
        self, batch: Sequence[SequenceSlice], spans: Sequence[QuerySpan], on_layer: LayerHook | None
    ) -> Iterator[StepOutput]:
        followers = self._followers

        def hook(layer: int) -> None:
            assert on_layer is not None
            followers.group.meet()
            try:
                on_layer(layer)
            except BaseException:
                followers.tell(Abandon())
                raise
            followers.tell(Go())

        followers.tell(self._deltas.step(batch, self._block_size, hooked=on_layer is not None))
        with self._own.step(
            batch, [self._asked_by_ranks(span) for span in spans], None if on_layer is None else hook
        ) as output:
            yield _LeadingOutput(output, followers)
            followers.tell(EndStep())

    def _asked_by_ranks(self, span: QuerySpan) -> QuerySpan:
        """Return a span whose KV on other instances is asked for by all ranks together."""
        if (own := span.elsewhere) is None:
            return span
        return replace(
            span, elsewhere=ElsewhereOfRanks(own.num_tokens, self._followers.group, self._asked, leaders=own)
        )

    def settle(self) -> None:
        self._own.settle()


class _LeadingOutput:
    """`StepOutput` for which all ranks compute."""

    def __init__(self, own: StepOutput, followers: Followers) -> None:
        self._own = own
        self._followers = followers

    def logits(self, rows: Rows) -> Tensor:
        return self._own.logits(self._asked(rows))

    def embeddings(self, rows: Rows) -> Tensor:
        return self._own.embeddings(rows)  # every rank has all of them

    def draw(self, rows: Rows, sequences: Sequence[EngineSequence]) -> list[int]:
        return self._own.draw(self._asked(rows), sequences)

    def _asked(self, rows: Rows) -> Rows:
        """Request the rows from all ranks. Return them as a tuple, so that all recognise a repeated request."""
        asked = tuple(rows)
        self._followers.tell(Score(asked))
        return asked
