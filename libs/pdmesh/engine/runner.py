"""The engine in torch: executes steps over a paged KV cache."""

from __future__ import annotations

import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import structlog
import torch
from torch import Tensor

from pdmesh.engine.attention import AttentionBackend, Span, TorchAttention
from pdmesh.engine.base import LayerHook, Logprobs, SequenceSlice, SliceResult, finish_reason
from pdmesh.engine.checkpoint import load_weights
from pdmesh.engine.files import load_model_config
from pdmesh.engine.kernels import Kernels, TorchKernels
from pdmesh.engine.kv_cache import TORCH_DTYPES, TorchKvStore
from pdmesh.engine.model import StepInputs, Transformer
from pdmesh.engine.model_config import ModelConfig
from pdmesh.engine.native import NativeAttention, NativeKernels, load_kernels, suits
from pdmesh.engine.sampler import sample, token_logprobs
from pdmesh.errors import ConfigError
from pdmesh.model import KvLayout, num_blocks_for

log = structlog.get_logger()

#: Logits of one tile while computing prompt log-probabilities: 4K rows of a large vocabulary would take gigabytes.
_TILE_LOGITS = 1 << 22


class TorchEngine:
    """Implements `pdmesh.engine.base.Engine` for a Hugging Face checkpoint.

    ``num_threads`` sets torch's threads for the whole process; 0 leaves them as they are. ``native`` allows what is
    faster than plain torch: compiled kernels and reordered weights; without it, this is the reference.
    ``deterministic`` makes results bit-identical whatever the batch composition and chunk boundaries where the compiled
    kernels run (bf16); elsewhere only the linear layers.
    """

    def __init__(
        self,
        checkpoint_dir: Path,
        *,
        num_blocks: int,
        block_size: int = 16,
        dtype: str = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        num_threads: int = 0,
        deterministic: bool = False,
        native: bool = True,
    ) -> None:
        if num_threads > 0:
            torch.set_num_threads(num_threads)
        config = load_model_config(checkpoint_dir)
        if max_model_len is not None and max_model_len > config.max_model_len:
            raise ConfigError(
                f"max_model_len is {max_model_len}, but {checkpoint_dir} has a context of {config.max_model_len} tokens"
            )
        self._max_model_len = max_model_len or config.max_model_len
        self._device = torch_device(device)
        layout = config.kv_layout(dtype=dtype, block_size=block_size)
        weights = load_weights(
            checkpoint_dir, config, dtype=TORCH_DTYPES[layout.dtype], device=self._device, packed=native
        )
        self._vocab_size = config.vocab_size
        self._attention, kernels = _compute(config, layout, self._device, native=native)
        log.info("compute path", kernels="native" if isinstance(kernels, NativeKernels) else "torch")
        self._transformer = Transformer(config, weights, kernels, deterministic=deterministic)
        self._kv = TorchKvStore(layout, num_blocks, self._device)

    @property
    def kv(self) -> TorchKvStore:
        return self._kv

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @torch.inference_mode()
    def execute(self, batch: Sequence[SequenceSlice], *, on_layer: LayerHook | None = None) -> list[SliceResult]:
        if not batch:
            return []
        spans = _spans(batch)
        inputs = _step_inputs(batch, self._kv.layout, self._device)
        hidden = self._transformer.forward(inputs, self._kv.layers, self._attention.plan(spans), on_layer)
        drawn = self._sample(batch, spans, hidden)
        prompts = [
            self._prompt_logprobs(part, hidden[span.row : span.row + span.num_tokens]) if part.prompt_logprobs else ()
            for part, span in zip(batch, spans, strict=True)
        ]
        return [_result(part, token, prompt) for part, token, prompt in zip(batch, drawn, prompts, strict=True)]

    def _sample(self, batch: Sequence[SequenceSlice], spans: Sequence[Span], hidden: Tensor) -> list[_Drawn | None]:
        sampling = [index for index, part in enumerate(batch) if part.sample]
        drawn: list[_Drawn | None] = [None] * len(batch)
        if not sampling:
            return drawn
        rows = [spans[index].row + spans[index].num_tokens - 1 for index in sampling]
        logits = self._transformer.logits(hidden[rows])
        token_ids = sample(logits, [batch[index].sequence for index in sampling])
        for index, token_id in zip(sampling, token_ids, strict=True):
            drawn[index] = _Drawn(token_id)
        wanted = [(row, params.logprobs) for row, params in enumerate(batch[i].sequence.params for i in sampling)]
        with_logprobs = [(row, num_top) for row, num_top in wanted if num_top is not None]
        if with_logprobs:
            rows = [row for row, _ in with_logprobs]
            chosen = [token_ids[row] for row in rows]
            for row, logprobs in zip(
                rows, token_logprobs(logits[rows], chosen, [num_top for _, num_top in with_logprobs]), strict=True
            ):
                drawn[sampling[row]] = _Drawn(token_ids[row], logprobs)
        return drawn

    def _prompt_logprobs(self, part: SequenceSlice, hidden: Tensor) -> tuple[Logprobs, ...]:
        """Log-probabilities of the prompt tokens that follow those of the slice."""
        sequence = part.sequence
        targets = sequence.token_ids[part.start + 1 : min(part.start + part.num_tokens + 1, sequence.num_prompt_tokens)]
        num_top = sequence.params.prompt_logprobs or 0
        tile_rows = max(1, _TILE_LOGITS // self._vocab_size)
        result: list[Logprobs] = []
        for first in range(0, len(targets), tile_rows):
            tile = targets[first : first + tile_rows].tolist()
            logits = self._transformer.logits(hidden[first : first + len(tile)])
            result += token_logprobs(logits, tile, [num_top] * len(tile))
        return tuple(result)


def torch_device(name: str) -> torch.device:
    """The device called ``name``; "auto" is cuda if there is one, else cpu."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device is {name!r}: use auto, cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {name!r}, but torch finds no CUDA device")
    return device


def _compute(
    config: ModelConfig, layout: KvLayout, device: torch.device, *, native: bool
) -> tuple[AttentionBackend, Kernels]:
    """The fastest attention and kernels that there are for this model here."""
    scale = config.head_dim**-0.5
    aligned = config.hidden_size % 16 == 0 and config.intermediate_size % 16 == 0
    if native and aligned and suits(layout, device) and (library := load_kernels()) is not None:
        return NativeAttention(library, layout, scale), NativeKernels(library, config.rms_norm_eps)
    return TorchAttention(layout, scale, device), TorchKernels(config.rms_norm_eps)


@dataclass(frozen=True, slots=True)
class _Drawn:
    token_id: int
    logprobs: Logprobs | None = None


def _result(part: SequenceSlice, drawn: _Drawn | None, prompt_logprobs: tuple[Logprobs, ...]) -> SliceResult:
    if drawn is None:
        return SliceResult(prompt_logprobs=prompt_logprobs)
    sequence = part.sequence
    reason, stop_token_id = finish_reason(sequence.params, sequence.num_output_tokens + 1, drawn.token_id)
    return SliceResult(
        token_id=drawn.token_id,
        logprobs=drawn.logprobs,
        finish_reason=reason,
        stop_token_id=stop_token_id,
        prompt_logprobs=prompt_logprobs,
    )


def _spans(batch: Sequence[SequenceSlice]) -> list[Span]:
    spans: list[Span] = []
    row = 0
    for part in batch:
        spans.append(Span(row, part.num_tokens, part.start, part.sequence.block_table))
        row += part.num_tokens
    return spans


def _step_inputs(batch: Sequence[SequenceSlice], layout: KvLayout, device: torch.device) -> StepInputs:
    token_ids = array.array("i")
    positions: list[npt.NDArray[np.int64]] = []
    blocks: list[npt.NDArray[np.int64]] = []
    new_blocks: list[int] = []
    for part in batch:
        end = part.start + part.num_tokens
        token_ids += part.sequence.token_ids[part.start : end]
        positions.append(np.arange(part.start, end))
        used = part.sequence.block_table[: num_blocks_for(end, layout.block_size)]
        blocks.append(np.asarray(used, dtype=np.int64)[positions[-1] // layout.block_size])
        new_blocks += used[num_blocks_for(part.start, layout.block_size) :]
    flat_positions = np.concatenate(positions)
    slots = np.concatenate(blocks) * layout.block_size + flat_positions % layout.block_size
    prompt_lengths = np.repeat([part.sequence.num_prompt_tokens for part in batch], [part.num_tokens for part in batch])

    def on_device(values: npt.ArrayLike) -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int64).reshape(-1)).to(device)

    return StepInputs(
        token_ids=on_device(np.frombuffer(token_ids, dtype=np.int32)),
        positions=on_device(flat_positions),
        num_prompt_tokens=on_device(prompt_lengths),
        slots=on_device(slots),
        new_blocks=on_device(new_blocks),
    )
