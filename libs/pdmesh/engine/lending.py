"""Computation of layers with a number of threads that may change from layer to layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from pdmesh.engine.attention import AttentionPlan
from pdmesh.engine.base import LayerHook
from pdmesh.engine.forward import Decoder
from pdmesh.engine.transformer_model import StepInputs


class Cores(Protocol):
    """The cores that an engine may use."""

    @property
    def num_own(self) -> int:
        """Number of cores that are always free for this engine."""
        ...

    def take(self) -> int:
        """Return the number of cores to use until `give_back`."""
        ...

    def give_back(self) -> None:
        """Report that the computation on the taken cores has ended."""
        ...


class LentDecoder:
    """A decoder that asks ``cores`` for the number of threads before each layer and before the scores.

    Everything else, such as sampling, uses the engine's own cores, because torch's sums over a row depend on the number
    of threads. Changing the number takes 0.3 us. A team of one thread does not disturb OpenMP's idle threads.
    """

    def __init__(self, decoder: Decoder, cores: Cores) -> None:
        self._decoder = decoder
        self._cores = cores

    def forward(
        self, inputs: StepInputs, caches: Sequence[Tensor], attention: AttentionPlan, on_layer: LayerHook | None
    ) -> Tensor:
        def hook(layer: int) -> None:
            self._cores.give_back()
            if on_layer is not None:
                on_layer(layer)  # may run another step
            torch.set_num_threads(self._cores.take())

        with self._lent():
            return self._decoder.forward(inputs, caches, attention, hook)

    def logits(self, hidden: Tensor) -> Tensor:
        with self._lent():
            return self._decoder.logits(hidden)

    def last_norm(self, hidden: Tensor) -> Tensor:
        return self._decoder.last_norm(hidden)

    @contextmanager
    def _lent(self) -> Iterator[None]:
        torch.set_num_threads(self._cores.take())
        try:
            yield
        finally:
            self._cores.give_back()
            torch.set_num_threads(self._cores.num_own)
