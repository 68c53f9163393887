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
from pdmesh.engine.checkpoint import LayerWeights, ModelWeights
from pdmesh.engine.kernels import Kernels, Rotation
from pdmesh.engine.linear import Linear
from pdmesh.engine.model_config import ModelConfig
from pdmesh.engine.rope import RotaryEmbedding

#: Rows of one product in deterministic mode. Libraries choose how to sum by the number of rows; among equally many
#: rows a row's result depends on itself alone (measured: oneDNN bf16 with AMX and without, MKL fp32). Fewer would slow
#: prefill, more would slow decode.
_DETERMINISTIC_ROWS = 64


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step's tokens, flattened, and where their keys and values go."""

    token_ids: Tensor  # (num_tokens,)
    positions: Tensor  # (num_tokens,)
    num_prompt_tokens: Tensor  # (num_tokens,), of each token's sequence
    slots: Tensor  # (num_tokens,): block * block_size + offset
    rests: Tensor | None  # rows of head_dim in blocks begun and not filled: to be wiped, unless they have been


class Transformer:
    """Weights and the forward pass."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, kernels: Kernels, *, deterministic: bool) -> None:
        self._config = config
        self._weights = weights
        self._kernels = kernels
        self._rotary = RotaryEmbedding(config.rope, config.head_dim, weights.norm.device, weights.norm.dtype)
        self._deterministic = deterministic

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    @property
    def num_heads(self) -> int:
        return self._config.num_heads

    @property
    def hidden_size(self) -> int:
        return self._config.hidden_size

    def forward(
        self, inputs: StepInputs, caches: Sequence[Tensor], attention: AttentionPlan, on_layer: LayerHook | None
    ) -> Tensor:
        """Hidden states (num_tokens, hidden_size) before the last norm; writes the tokens' keys and values."""
        hidden, rotation = self.embed(inputs)
        delta: Tensor | None = None
        for number, cache in enumerate(caches):
            # What another sequence left behind this one's end is wiped when it begins the block: a NaN would pass the
            # mask (0 x NaN). No more than that: a step that is computed again changes nothing that others may read.
            if inputs.rests is not None and len(inputs.rests):
                cache.view(-1, cache.shape[-1]).index_fill_(0, inputs.rests, 0)
            hidden, query = self.before_attention(number, hidden, delta, rotation, cache)
            if on_layer is not None:
                on_layer(number)
            hidden, delta = self.after_attention(number, hidden, attention.attend(query, cache).output)
        return hidden if delta is None else hidden + delta

    # A layer, in the two parts that lie before and after its attention. ``hidden`` and ``delta`` are what the layer
    # before left: their sum is the hidden states, of which the next norm takes care.

    def embed(self, inputs: StepInputs) -> tuple[Tensor, Rotation]:
        """Hidden states (num_tokens, hidden_size) before the first layer, and what all layers rotate by."""
        hidden = self._weights.embedding.embed(inputs.token_ids)
        cos, sin = self._rotary.cos_sin(inputs.positions, inputs.num_prompt_tokens)
        return hidden, Rotation(cos=cos, sin=sin, slots=inputs.slots)

    def before_attention(
        self, number: int, hidden: Tensor, delta: Tensor | None, rotation: Rotation, cache: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Hidden states, and queries (num_tokens, heads, head_dim); keys and values are in the cache then."""
        layer = self._weights.layers[number]
        hidden, normed = self._kernels.add_norm(hidden, delta, layer.input_norm)
        qkv = self._project(layer, normed)
        return hidden, self._kernels.rotate_and_store(qkv, self._config.num_heads, rotation, cache)

    def after_attention(self, number: int, hidden: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states and delta, from what attention gave for the queries."""
        layer, kernels = self._weights.layers[number], self._kernels
        delta = self._linear(attended.flatten(1), layer.output)
        hidden, normed = kernels.add_norm(hidden, delta, layer.post_attention_norm)
        return hidden, self._linear(kernels.gated_silu(self._linear(normed, layer.gate_up)), layer.down)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Scores of the next token in fp32, (rows, vocab_size), for chosen rows of `forward`; into ``out`` if given."""
        _, normed = self._kernels.add_norm(hidden, None, self._weights.norm)
        scores = self._linear(normed, self._weights.lm_head)
        return scores.float() if out is None else out.copy_(scores)

    def tabulate_rotation(self, num_positions: int) -> None:
        """Look rotations up from now on, for tokens before ``num_positions``: on a device, fewer kernels a step."""
        self._rotary.tabulate(num_positions)

    def _project(self, layer: LayerWeights, normed: Tensor) -> Tensor:
        """Queries, keys and values: (num_tokens, heads, head_dim)."""
        config = self._config
        qkv = self._linear(normed, layer.qkv).view(normed.shape[0], -1, config.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            num_heads, num_rotated = config.num_heads, config.num_heads + config.num_kv_heads
            _, query = self._kernels.add_norm(qkv[:, :num_heads].contiguous(), None, layer.q_norm)
            _, key = self._kernels.add_norm(qkv[:, num_heads:num_rotated].contiguous(), None, layer.k_norm)
            qkv = torch.cat((query, key, qkv[:, num_rotated:]), dim=1)
        return qkv

    def _linear(self, rows: Tensor, linear: Linear) -> Tensor:
        if not self._deterministic or linear.row_by_row:
            return linear(rows)
        padded = functional.pad(rows, (0, 0, 0, -len(rows) % _DETERMINISTIC_ROWS))
        return torch.cat([linear(tile) for tile in padded.split(_DETERMINISTIC_ROWS)])[: len(rows)]  # type: ignore[no-untyped-call]
