"""Measurement of whether a model's activations fit float16, on a short prompt when the model is loaded.

The prompt depends on the vocabulary size alone, and ordered kernels compute it to the same bits on every processor. All
instances of a mesh therefore decide alike.
"""

from __future__ import annotations

import array
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pdmesh.engine.base import EngineSequence, SequenceSlice
from pdmesh.engine.compute import Compute
from pdmesh.engine.forward import DirectForward, step_spans
from pdmesh.engine.kernels import Kernels, Rotation
from pdmesh.engine.model_config import ModelConfig
from pdmesh.engine.transformer_model import Transformer
from pdmesh.kv_layout import num_blocks_for
from pdmesh.model import RequestId, SamplingParams

#: Largest accepted magnitude. Float16 ends at 65,504; the margin is for prompts with larger activations.
FLOAT16_LIMIT = 65_504 / 16

_NUM_TOKENS = 128


def num_calibration_blocks(block_size: int) -> int:
    """Return the number of KV blocks that `largest_activation` needs."""
    return num_blocks_for(_NUM_TOKENS, block_size)


@torch.inference_mode()
def largest_activation(compute: Compute, config: ModelConfig, block_size: int, max_model_len: int) -> float:
    """Return the largest magnitude that layers round to float16, or infinity if any value is NaN.

    Hidden states and the terms added to them stay in fp32 and are not measured. ``compute`` is used once: its kernels
    stay wrapped.
    """
    forward = compute.forward
    assert isinstance(forward, DirectForward), "devices compute in the checkpoint's dtype"
    assert isinstance(forward.decoder, Transformer), "only described models are calibrated"
    watched = _WatchedKernels(forward.decoder.kernels)
    forward.decoder.kernels = watched
    token_ids = prompt_of(config.vocab_size)[:max_model_len]
    sequence = EngineSequence(
        request_id=RequestId("calibration"),
        params=SamplingParams(max_tokens=1),
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        block_table=list(range(num_calibration_blocks(block_size))),
    )
    batch = [SequenceSlice(sequence=sequence, start=0, num_tokens=len(token_ids), sample=False)]
    with forward.step(batch, step_spans(batch), None):
        return watched.largest


def prompt_of(vocab_size: int) -> array.array[int]:
    """Return token ids from all of a vocabulary, most of them low: these are bytes, punctuation and frequent tokens."""
    places = (37 * number % _NUM_TOKENS for number in range(_NUM_TOKENS))
    return array.array("i", [vocab_size * place * place // _NUM_TOKENS**2 for place in places])


@dataclass(slots=True)
class _WatchedKernels:
    """Kernels that record the largest magnitude of the values between a model's products."""

    kernels: Kernels
    largest: float = 0.0

    def add_norm(
        self, hidden: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        hidden, normed = self.kernels.add_norm(hidden, delta, weight, bias)
        self._note(normed)
        return hidden, normed

    def norm(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        normed = self.kernels.norm(rows, weight, bias)
        for values in (rows, normed) if rows.dtype != torch.float32 else ():
            self._note(values)
        return normed

    def norm_heads(self, heads: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        self._note(heads)
        normed = self.kernels.norm_heads(heads, weight, bias)
        self._note(normed)
        return normed

    def gate(self, rows: Tensor, gates: Tensor) -> Tensor:
        self._note(gates)
        return self.kernels.gate(rows, gates)

    def rotate_and_store(self, qkv: Tensor, num_heads: int, rotation: Rotation, cache: Tensor) -> Tensor:
        self._note(qkv)
        return self.kernels.rotate_and_store(qkv, num_heads, rotation, cache)

    def activate(self, rows: Tensor) -> Tensor:
        self._note(rows)
        activated = self.kernels.activate(rows)
        self._note(activated)
        return activated

    def _note(self, values: Tensor) -> None:
        largest = float(values.abs().amax())
        self.largest = math.inf if math.isnan(largest) else max(self.largest, largest)
