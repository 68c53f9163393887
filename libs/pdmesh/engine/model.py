"""The transformer: Llama, Qwen2 and Qwen3, over flat tokens and a paged KV cache.

All tokens of a step, whatever sequences they belong to, go through the linear layers together. Nothing here is kept
between calls, so that a layer hook may run another step before it returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pdmesh.engine.attention import AttentionPlan
from pdmesh.engine.base import LayerHook
from pdmesh.engine.checkpoint import LayerWeights, ModelWeights, Projection
from pdmesh.engine.model_config import ModelConfig
from pdmesh.engine.rope import RotaryEmbedding, rotate

#: Measured: from this many rows on, a row's result of an fp32 linear layer does not depend on the others.
_DETERMINISTIC_ROWS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """A step's tokens, flattened, and where their keys and values go."""

    token_ids: Tensor  # (num_tokens,)
    positions: Tensor  # (num_tokens,)
    num_prompt_tokens: Tensor  # (num_tokens,), of each token's sequence
    key_rows: Tensor  # (num_tokens * num_kv_heads,): the cache's rows of (block, key or value, head, offset)
    value_rows: Tensor
    new_blocks: Tensor  # blocks written for the first time by their sequences


class Transformer:
    """Weights and the forward pass."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, *, deterministic: bool) -> None:
        self._config = config
        self._weights = weights
        self._rotary = RotaryEmbedding(config.rope, config.head_dim, weights.embedding.device)
        self._min_rows = _DETERMINISTIC_ROWS if deterministic and weights.norm.dtype == torch.float32 else 1

    def forward(
        self, inputs: StepInputs, caches: Sequence[Tensor], attention: AttentionPlan, on_layer: LayerHook | None
    ) -> Tensor:
        """Hidden states (num_tokens, hidden_size) before the last norm; writes the tokens' keys and values."""
        hidden = functional.embedding(inputs.token_ids, self._weights.embedding)
        cos, sin = self._rotary.cos_sin(inputs.positions, inputs.num_prompt_tokens, hidden.dtype)
        for number, (layer, cache) in enumerate(zip(self._weights.layers, caches, strict=True)):
            query, key, value = self._project(layer, hidden, cos, sin)
            _write(cache, inputs, key, value)
            if on_layer is not None:
                on_layer(number)
            attended = attention.attend(query, cache).output
            hidden = hidden + self._linear(attended.flatten(1), layer.output)
            hidden = hidden + self._mlp(layer, self._norm(hidden, layer.post_attention_norm))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token in fp32, (rows, vocab_size), for chosen rows of `forward`."""
        normed = self._norm(hidden, self._weights.norm)
        return self._linear(normed, Projection(self._weights.lm_head, None)).float()

    def _project(self, layer: LayerWeights, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values: (num_tokens, heads, head_dim)."""
        config = self._config
        fused = self._linear(self._norm(hidden, layer.input_norm), layer.qkv).view(len(hidden), -1, config.head_dim)
        num_rotated = config.num_heads + config.num_kv_heads
        query_key, value = fused[:, :num_rotated], fused[:, num_rotated:]
        if layer.q_norm is not None and layer.k_norm is not None:
            query, key = query_key[:, : config.num_heads], query_key[:, config.num_heads :]
            query_key = torch.cat((self._norm(query, layer.q_norm), self._norm(key, layer.k_norm)), dim=1)
        rotated = rotate(query_key, cos, sin)
        return rotated[:, : config.num_heads], rotated[:, config.num_heads :], value

    def _mlp(self, layer: LayerWeights, normed: Tensor) -> Tensor:
        gate, up = self._linear(normed, layer.gate_up).chunk(2, dim=-1)
        return self._linear(functional.silu(gate) * up, layer.down)

    def _linear(self, rows: Tensor, projection: Projection) -> Tensor:
        missing = self._min_rows - len(rows)
        if missing > 0:
            padded = functional.pad(rows, (0, 0, 0, missing))
            return functional.linear(padded, projection.weight, projection.bias)[: len(rows)]
        return functional.linear(rows, projection.weight, projection.bias)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm in fp32, rounded before the weight is applied, as transformers does."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._config.rms_norm_eps)
        return weight * wide.to(x.dtype)


def _write(cache: Tensor, inputs: StepInputs, key: Tensor, value: Tensor) -> None:
    """Put the step's keys and values into one layer's cache.

    A block's former content is wiped when a sequence begins it: a NaN left there by another sequence would pass
    the mask (0 x NaN).
    """
    cache.index_fill_(0, inputs.new_blocks, 0)
    rows = cache.view(-1, cache.shape[-1])
    rows.index_copy_(0, inputs.key_rows, key.reshape(-1, cache.shape[-1]))
    rows.index_copy_(0, inputs.value_rows, value.reshape(-1, cache.shape[-1]))
