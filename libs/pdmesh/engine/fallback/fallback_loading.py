"""Loading and trial of a checkpoint that transformers' modules compute."""

from __future__ import annotations

import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
import transformers
from torch import Tensor

from pdmesh.engine.arithmetic_class import class_name, torch_kind
from pdmesh.engine.attention import TorchAttention
from pdmesh.engine.base import EngineSequence, SequenceSlice
from pdmesh.engine.compute import Compute, PagedStore
from pdmesh.engine.fallback.fallback_attention import IMPLEMENTATION
from pdmesh.engine.fallback.modules import load_modules, probed, sentence_of
from pdmesh.engine.fallback.transformer import ModuleTransformer
from pdmesh.engine.forward import DirectForward, step_spans
from pdmesh.engine.kv_cache import TORCH_DTYPES, TorchKvStore
from pdmesh.engine.model_config import UndescribedModel
from pdmesh.errors import ConfigError
from pdmesh.kv_layout import KvLayout, num_blocks_for
from pdmesh.model import RequestId, SamplingParams

log = structlog.get_logger()

#: Chunks in which a model is tried at start, and the largest accepted difference between their scores and the whole
#: prompt's, relative to the spread of scores. A wrong mask, position or scale would make the scores entirely different.
_TRIED_CHUNKS = (1, 40, 55)
_TOLERANCES = {"float32": 1e-3, "bfloat16": 0.2, "float16": 0.05}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModules:
    """Implements `pdmesh.engine.model_loading.LoadedModel`."""

    config: UndescribedModel
    layout: KvLayout
    max_model_len: int
    transformer: ModuleTransformer
    device: torch.device

    def compute(self, num_blocks: int, memory: Tensor | None = None, num_frames: int | None = None) -> Compute:
        store = self.store(num_blocks, memory)
        kinds = [torch_kind(self.device, deterministic=False), f"transformers-{transformers.__version__}"]
        return Compute(
            name="transformers' modules",
            reason=f"{self.config.architecture} is not described here: slower",
            arithmetic=class_name(self.layout.dtype, kinds),
            forward=self.forward(store),
            kv=store,
        )

    def store(self, num_blocks: int, memory: Tensor | None = None) -> PagedStore:
        if self.device.type == "cpu":
            return TorchKvStore(self.layout, num_blocks, memory)
        from pdmesh.engine.cuda.cuda_compute import device_store
        from pdmesh.engine.cuda.streams import CudaStreams

        return device_store(self.layout, num_blocks, CudaStreams(self.device))

    def forward(self, store: PagedStore) -> DirectForward:
        attention = TorchAttention(self.layout, self.config.scale, self.device, self.config.score_cap)
        return DirectForward(self.transformer, attention, store.layers, layout=self.layout, device=self.device)


def load_undescribed(
    checkpoint_dir: Path,
    model: UndescribedModel,
    *,
    device: torch.device,
    dtype: str,
    block_size: int,
    max_model_len: int,
) -> LoadedModules:
    """Load a checkpoint, and compare its scores in chunks with transformers' own. Log a warning that it is slow.

    Raise ConfigError for a model that cannot be served exactly.
    """
    model = probed(checkpoint_dir, model)
    layout = model.kv_layout(dtype=dtype, block_size=block_size)
    log.warning(
        "transformers' own modules compute this model, as it is not described here: expect it to be slower",
        architecture=model.architecture,
    )
    modules = load_modules(checkpoint_dir, model, TORCH_DTYPES[layout.dtype])
    try:
        loaded, difference = _tried(modules.to(device), model, layout, max_model_len, device)
    except Exception as error:
        raise ConfigError(
            f"{checkpoint_dir}: this {model.architecture} is not supported: it fails: {sentence_of(error)}"
        ) from error
    if not difference <= _TOLERANCES[layout.dtype]:
        raise ConfigError(
            f"{checkpoint_dir}: this {model.architecture} is not supported: its scores for a prompt in chunks differ "
            f"from those for the whole prompt ({difference:.2g} of their spread)"
        )
    return loaded


def _tried(
    modules: Any, model: UndescribedModel, layout: KvLayout, max_model_len: int, device: torch.device
) -> tuple[LoadedModules, float]:
    """Return the model with the paged attention, and how much its scores in chunks differ from transformers' own.

    The difference is relative to the spread of the scores.
    """
    token_ids = _some_tokens(min(sum(_TRIED_CHUNKS), max_model_len), model.vocab_size)
    with torch.inference_mode():
        ids = torch.tensor([token_ids], device=device)
        expected = modules(input_ids=ids, use_cache=False).logits[0].float()
    modules.set_attn_implementation(IMPLEMENTATION)
    loaded = LoadedModules(
        config=model,
        layout=layout,
        max_model_len=max_model_len,
        transformer=ModuleTransformer(model, modules),
        device=device,
    )
    return loaded, _relative(_scores_in_chunks(loaded, token_ids), expected)


@torch.inference_mode()
def _scores_in_chunks(loaded: LoadedModules, token_ids: list[int]) -> Tensor:
    """Return the scores after each token of a sequence that is computed in chunks over a small cache."""
    num_blocks = num_blocks_for(len(token_ids), loaded.layout.block_size)
    forward = loaded.forward(loaded.store(num_blocks))
    sequence = EngineSequence(
        request_id=RequestId("tried"),
        params=SamplingParams(max_tokens=1),
        token_ids=array.array("i", token_ids),
        num_prompt_tokens=len(token_ids),
        block_table=[*reversed(range(num_blocks))],
    )
    scores: list[Tensor] = []
    start = 0
    for size in _TRIED_CHUNKS:
        num_tokens = min(size, len(token_ids) - start)
        if num_tokens:
            part = SequenceSlice(sequence=sequence, start=start, num_tokens=num_tokens, sample=False)
            with forward.step([part], step_spans([part]), None) as output:
                scores.append(output.logits(range(num_tokens)))
        start += num_tokens
    return torch.cat(scores)


def _some_tokens(num_tokens: int, vocab_size: int) -> list[int]:
    """Return token ids from all of the vocabulary."""
    return [(7919 * number + 13) % vocab_size for number in range(num_tokens)]


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / (expected - expected.mean()).norm())
