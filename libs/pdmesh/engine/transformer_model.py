"""The transformer that a `ModelConfig` describes, over flat tokens and a paged KV cache.

All tokens of a step, whatever their sequences, go through the linear layers together. No state is kept between calls,
so a layer hook may run another step before it returns.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pdmesh.engine.attention import AttentionPlan
from pdmesh.engine.base import LayerHook
from pdmesh.engine.delta_net import DeltaLayer, delta_net, fastest_delta_compute
from pdmesh.engine.experts import Experts, Mlp, mix_experts
from pdmesh.engine.kernels import Kernels, Rotation, by_value
from pdmesh.engine.latent_attention import latent_queries, values_of
from pdmesh.engine.linear import Linear
from pdmesh.engine.model_config import ModelConfig, QkNorm
from pdmesh.engine.rope import RotaryEmbedding, rotate
from pdmesh.engine.short_conv import fastest_short_conv
from pdmesh.engine.state_sizes import DeltaNet
from pdmesh.engine.states import StateSlice
from pdmesh.engine.weights import HeadNorm, LayerInput, LayerWeights, ModelWeights, Norm
from pdmesh.kv_layout import IndexRange

#: Number of rows per product in deterministic mode. Libraries choose the order of sums by the number of rows. With a
#: fixed number, a row's result depends on itself alone (measured: oneDNN bf16 with AMX and without, MKL fp32). Fewer
#: rows would slow prefill, more would slow decode.
_DETERMINISTIC_ROWS = 64


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step's tokens, flattened, and the places of their keys and values.

    All but ``rests`` are (num_tokens,). ``num_prompt_tokens`` are of each token's sequence. ``slots`` are block *
    block_size + offset. ``rests`` are the unfilled rows, of head_dim, in blocks that a slice begins, by the number of a
    layer's key-value heads; None if they are wiped already. ``windowed`` has the places in layers with a window, if
    these use frames. ``earlier`` are the slots of each token and of those before, (num_tokens, taps), and -1 before the
    first; None without convolutions. ``slices`` are the sequences' rows, and their pages in layers with states.
    """

    token_ids: Tensor
    positions: Tensor
    num_prompt_tokens: Tensor
    slots: Tensor
    rests: Mapping[int, Tensor] | None
    windowed: Places | None = None
    earlier: Tensor | None = None
    slices: Sequence[StateSlice] = ()


class Places(NamedTuple):
    """Places of a step's keys and values, as in `StepInputs`."""

    slots: Tensor
    rests: Mapping[int, Tensor] | None
    earlier: Tensor | None = None


def wipe_rests(cache: Tensor, places: StepInputs | Places) -> None:
    """Zero the unfilled rows of blocks that a slice begins. A NaN of another sequence would pass the mask (0 x NaN).

    No other rows are changed: a step that is computed again changes nothing that others may read.
    """
    if places.rests is not None and len(rows := places.rests[cache.shape[2]]):
        cache.view(-1, cache.shape[-1]).index_fill_(0, rows, 0)


class Carried(NamedTuple):
    """State between two layers. The hidden states are the sum, which the next norm computes."""

    hidden: Tensor
    delta: Tensor | None


def hidden_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of hidden states between layers, for products in ``dtype``.

    On CPUs, hidden states and the products added to them stay in fp32. Sums over all layers are rounded once, before
    the next product. Trained models have single hidden states of 20,000 and more, which float16 could hardly hold.
    """
    return torch.float32 if device.type == "cpu" else dtype


class Transformer:
    """The weights and forward pass of a model, or of some of its layers."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        kernels: Kernels,
        *,
        deterministic: bool,
        cache_heads: Sequence[IndexRange] | None = None,
        first_layer: int = 0,
    ) -> None:
        """``config`` and ``weights`` have only the layers computed here, from ``first_layer`` on.

        ``cache_heads`` are the heads of each layer's cache that ``config`` has, if other ranks compute the rest.
        """
        self._config = config
        self._first_layer = first_layer
        self._cache_heads = cache_heads
        self._weights = weights
        self.kernels = kernels
        device, dtype = weights.device, weights.dtype
        widths = [
            config.page(layer).head_dim if layer.attends and layer.latent is None else config.head_dim
            for layer in config.layers
        ]
        kinds = list(zip([layer.rope for layer in config.layers], widths, strict=True))
        distinct = list(dict.fromkeys(kinds))
        self._rotaries = [
            RotaryEmbedding(rope, head_dim, device, dtype, rotary_dim=config.rotary_dim) for rope, head_dim in distinct
        ]
        self._rotation_of = [distinct.index(kind) for kind in kinds]
        self._cache_of = _caches_of(config)
        self._dtype = dtype
        self.hidden_dtype = hidden_dtype(dtype, device)
        # Rounded as in transformers.
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=self.hidden_dtype))
        self._deterministic = deterministic

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    @property
    def first_layer(self) -> int:
        """Number of the first layer here."""
        return self._first_layer

    @property
    def num_heads(self) -> int:
        return self._config.num_heads

    @property
    def hidden_size(self) -> int:
        return self._config.hidden_size

    def forward(
        self, inputs: StepInputs, caches: Sequence[Tensor], attention: AttentionPlan, on_layer: LayerHook | None
    ) -> Tensor:
        """Compute hidden states (num_tokens, hidden_size) before the last norm, and store keys and values."""
        hidden, delta = self.through(Carried(self.embed_tokens(inputs), None), inputs, caches, attention, on_layer)
        return hidden if delta is None else hidden + delta

    def through(
        self,
        before: Carried,
        inputs: StepInputs,
        caches: Sequence[Tensor],
        attention: AttentionPlan,
        on_layer: LayerHook | None,
    ) -> Carried:
        """Compute the layers here and return the state after the last. ``before`` is the state that enters the first.

        Store each layer's keys and values in that layer's cache, and then call ``on_layer`` with the cache's number.
        """
        (hidden, delta), rotations = before, self.rotations(inputs)
        layer_inputs = self._layer_inputs(inputs.token_ids, hidden)
        windowed = inputs.windowed or inputs
        rotations_of_windowed = [replace(rotation, slots=windowed.slots) for rotation in rotations]
        for number, layer in enumerate(self._config.layers):
            has_window, stores = layer.window is not None, layer.reads is None
            cache = caches[self._cache_of[number]]
            if stores and layer.delta is None:
                wipe_rests(cache, windowed if has_window else inputs)
            if self._cache_heads is not None:
                cache = cache[:, :, slice(*self._cache_heads[number])]
            own = rotations_of_windowed if has_window else rotations
            if layer.delta is not None:
                hidden, query = self._through_delta_net(number, layer.delta, hidden, delta, inputs.slices, cache)
            else:
                hidden, query = self.before_attention(number, hidden, delta, own, cache)
            if on_layer is not None and stores:
                on_layer(self._first_layer + self._cache_of[number])
            attended = query
            if layer.conv is not None:
                attended = self._convolve(number, query, cache, windowed.earlier)
            elif layer.delta is None:
                attended = self._attend(number, query, cache, attention)
            own_input = None if layer_inputs is None else layer_inputs[:, number]
            hidden, delta = self.after_attention(number, hidden, attended, own_input)
        return Carried(hidden, delta)

    def _attend(self, number: int, query: Tensor, cache: Tensor, attention: AttentionPlan) -> Tensor:
        sinks, window = self._weights.layers[number].mixer.sinks, self._config.layers[number].window
        gate = None
        if self._config.gates_attention:
            query, gate = query.tensor_split(2, dim=1)
        output, lse = attention.attend(query, cache, window=window, with_lse=sinks is not None)
        weights, latent = self._weights.layers[number].mixer.latent, self._config.layers[number].latent
        if weights is not None and latent is not None:
            return values_of(output, latent, weights, self._linear)
        if gate is not None:
            return self.kernels.gate(output, gate)
        if sinks is None or lse is None:
            return output
        # The share of a softmax that one more score leaves for the others.
        return (output * by_value(torch.sigmoid, lse - sinks)[..., None]).to(output.dtype)

    def _through_delta_net(
        self,
        number: int,
        config: DeltaNet,
        hidden: Tensor,
        delta: Tensor | None,
        slices: Sequence[StateSlice],
        cache: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return hidden states and the gated results (num_tokens, values), and write states to the cache."""
        layer = self._weights.layers[number]
        weights = layer.mixer.delta
        assert weights is not None, "the layer has no delta net"
        hidden, normed = self._add_norm(hidden, delta, layer.input_norm)
        products, net = self._linear(normed, layer.mixer.qkv), DeltaLayer(config, weights, self._config.norm.epsilon)
        return hidden, delta_net(products, cache, slices, net, fastest_delta_compute(products.dtype))

    def _convolve(self, number: int, products: Tensor, cache: Tensor, earlier: Tensor | None) -> Tensor:
        """Return the gated convolution (num_tokens, hidden_size) of the inputs in the cache."""
        taps = self._weights.layers[number].mixer.taps
        assert taps is not None, "the layer has no convolution"
        assert earlier is not None, "the step has no slots of earlier tokens"
        return fastest_short_conv(products.dtype, products.device.type).convolve(products, cache, earlier, taps)

    # The parts of a layer before and after its attention. ``hidden`` and ``delta`` are the state of the layer before.

    def embed(self, inputs: StepInputs) -> tuple[Tensor, Sequence[Rotation]]:
        """Return hidden states (num_tokens, hidden_size) before the first layer, and the layers' distinct rotations."""
        return self.embed_tokens(inputs), self.rotations(inputs)

    def embed_tokens(self, inputs: StepInputs) -> Tensor:
        """Return hidden states (num_tokens, hidden_size) before the model's first layer."""
        assert self._weights.embedding is not None, "tokens enter in the first stage"
        hidden = self._weights.embedding.embed(inputs.token_ids).to(self.hidden_dtype)
        if self._embedding_scale != 1:
            hidden = hidden * self._embedding_scale
        if self._weights.positions is not None:
            hidden = hidden + functional.embedding(inputs.positions, self._weights.positions)
        return hidden

    def rotations(self, inputs: StepInputs) -> Sequence[Rotation]:
        """Return the layers' distinct rotations."""
        tables = [rotary.cos_sin(inputs.positions, inputs.num_prompt_tokens) for rotary in self._rotaries]
        return [Rotation(cos=cos, sin=sin, slots=inputs.slots) for cos, sin in tables]

    def before_attention(
        self, number: int, hidden: Tensor, delta: Tensor | None, rotations: Sequence[Rotation], cache: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return hidden states and queries (num_tokens, heads, head_dim), and write keys and values to the cache.

        A layer that reads another layer's KV writes none. A layer with a convolution writes the convolution's inputs,
        and returns the products instead of queries.
        """
        layer, rotation = self._weights.layers[number], rotations[self._rotation_of[number]]
        hidden, normed = self._add_norm(hidden, delta, layer.input_norm)
        latent = self._config.layers[number].latent
        if layer.mixer.latent is not None and latent is not None:
            products = self._linear(normed, layer.mixer.qkv)
            return hidden, latent_queries(products, cache, rotation, latent, layer.mixer.latent, self._linear)
        qkv = self._project(number, normed)
        if layer.mixer.taps is not None:
            fastest_short_conv(qkv.dtype, qkv.device.type).store(qkv, rotation.slots, cache)
            return hidden, qkv
        if self._config.layers[number].reads is not None:
            return hidden, rotate(qkv, rotation.cos, rotation.sin)
        if self._config.gates_attention:
            qkv, gate = qkv.tensor_split((-self._config.num_heads,), dim=1)
            query = self.kernels.rotate_and_store(qkv, self._config.num_heads, rotation, cache)
            return hidden, torch.cat((query, gate), dim=1)
        return hidden, self.kernels.rotate_and_store(qkv, self._config.num_heads, rotation, cache)

    def after_attention(
        self, number: int, hidden: Tensor, attended: Tensor, own_input: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return hidden states and delta after the layer, from the attention's results for the queries.

        ``own_input`` (num_tokens, size) is from the tokens' embeddings for this layer, if the model has these.
        """
        layer = self._weights.layers[number]
        delta = self._added(self._delta(attended.flatten(1), layer.mixer.output), layer.attention_output_norm)
        if layer.mlp is not None:
            hidden, normed = self._add_norm(hidden, delta, layer.mlp_norm)
            delta = self._added(self._feed_forward(layer.mlp, layer, hidden, normed), layer.mlp_output_norm)
        if layer.own_input is not None and own_input is not None:
            hidden = hidden + delta
            delta = self._from_own_input(layer.own_input, hidden, own_input)
        if layer.scale is not None:
            hidden, delta = hidden * layer.scale, delta * layer.scale
        return hidden, delta

    def _feed_forward(self, mlp: Mlp | Experts, layer: LayerWeights, hidden: Tensor, normed: Tensor) -> Tensor:
        """Return the results of a layer's MLP, of its experts, or of both."""
        if isinstance(mlp, Experts):
            return mix_experts(mlp, normed, self._linear, self._mlp).to(self.hidden_dtype)
        given, beside = self._mlp(normed, mlp), layer.experts_beside
        if beside is None:
            return given
        _, routed = self.kernels.add_norm(hidden, None, *beside.router_norm)
        _, rows = self.kernels.add_norm(hidden, None, *beside.norm)
        mixed = mix_experts(beside.experts, rows, self._linear, self._mlp, routed=routed).to(self.hidden_dtype)
        return self.kernels.norm(given, *beside.mlp_output_norm) + self.kernels.norm(mixed, *beside.output_norm)

    def _layer_inputs(self, token_ids: Tensor, embedded: Tensor) -> Tensor | None:
        """Return each layer's own input (num_tokens, layers, size), or None if the model has no embeddings by layer.

        The input is the mean of the token's embedding for the layer and a projection of the model's embedding.
        """
        weights, sizes = self._weights.layer_inputs, self._config.embedding_by_layer
        if weights is None or sizes is None:
            return None
        shape = (len(token_ids), self._config.num_layers, sizes.size)
        own = weights.table.embed(token_ids).to(self.hidden_dtype) * sizes.size**0.5
        projected = self._delta(embedded.to(self._dtype), weights.projection) * self._config.hidden_size**-0.5
        normed = self.kernels.norm(projected.view(shape), *weights.norm)
        mixed: Tensor = (normed + own.view(shape)) * 2**-0.5
        return mixed.to(self._dtype)

    def _from_own_input(self, weights: LayerInput, hidden: Tensor, own_input: Tensor) -> Tensor:
        gate = self._linear(hidden.to(self._dtype), weights.gate)
        activated = self.kernels.activate(torch.cat((gate, own_input), dim=-1))
        return self.kernels.norm(self._delta(activated, weights.output), *weights.norm)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return scores of the next token in fp32, (rows, vocab_size), for rows of `forward`; in ``out`` if given."""
        assert self._weights.lm_head is not None, "scores come out of the last stage"
        _, normed = self.kernels.add_norm(hidden, None, *self._weights.norm)
        scores = self._linear(normed, self._weights.lm_head, wide=True)
        scores = scores if out is None else out.copy_(scores)
        config = self._config
        if config.logit_scale != 1:
            scores *= config.logit_scale
        if config.logit_cap is not None:
            scores.div_(config.logit_cap).tanh_().mul_(config.logit_cap)
        return scores

    def last_norm(self, hidden: Tensor) -> Tensor:
        """Return chosen rows of `forward` after the last norm, in their dtype, for embeddings."""
        return self.kernels.norm(hidden, *self._weights.norm)

    def tabulate_rotation(self, num_positions: int) -> None:
        """Use tables of rotations from now on, for positions before ``num_positions``: fewer kernels on a device."""
        for rotary in self._rotaries:
            rotary.tabulate(num_positions)

    def _add_norm(self, hidden: Tensor, delta: Tensor | None, norm: Norm | None) -> tuple[Tensor, Tensor]:
        """Return ``hidden + delta`` and its norm, or without a norm the sum in the dtype of products."""
        if norm is not None:
            return self.kernels.add_norm(hidden, delta, *norm)
        hidden = hidden if delta is None else hidden + delta
        return hidden, hidden.to(self._dtype)

    def _added(self, delta: Tensor, norm: Norm | None) -> Tensor:
        """Return the term that attention or an MLP adds to the residual stream."""
        if norm is not None:
            delta = self.kernels.norm(delta, *norm)
        return delta if self._config.residual_scale == 1 else delta * self._config.residual_scale

    def _project(self, number: int, normed: Tensor) -> Tensor:
        """Return queries, keys and values: (num_tokens, heads, head_dim). Without keys of its own, only queries.

        For a layer with a convolution, return the products (num_tokens, 3 * hidden_size).
        """
        config, layer = self._config, self._weights.layers[number].mixer
        num_kv_heads, head_dim = config.page(config.layers[number])
        products = self._linear(normed, layer.qkv)
        if layer.taps is not None:
            return products
        qkv = products.view(normed.shape[0], -1, head_dim)
        num_heads = config.num_heads
        own = qkv.tensor_split((num_heads, num_heads + num_kv_heads, num_heads + 2 * num_kv_heads), dim=1)
        query, key, value, gate = own
        if config.layers[number].keys_are_values:
            value = key.clone()
        if layer.q_norm is not None:
            query = self._norm_heads(query, layer.q_norm)
        if layer.k_norm is not None:
            key = self._norm_heads(key, layer.k_norm)
        if layer.v_norm is not None:
            value = self.kernels.norm_heads(value, *layer.v_norm)
        heads = (query, key, value, gate)
        return qkv if all(map(operator.is_, heads, own)) else torch.cat(heads, dim=1)

    def _norm_heads(self, own: Tensor, head_norm: HeadNorm) -> Tensor:
        norm, gathered = head_norm
        if gathered is None and self._config.qk_norm is not QkNorm.ALL_HEADS:
            return self.kernels.norm_heads(own, *norm)
        heads = own if gathered is None else gathered.all_of(own)
        rows = heads.flatten(1) if self._config.qk_norm is QkNorm.ALL_HEADS else heads
        normed = self.kernels.norm(rows.contiguous(), *norm).view(heads.shape)
        return normed if gathered is None else gathered.own_of(normed)

    def _mlp(self, rows: Tensor, mlp: Mlp) -> Tensor:
        return self._delta(self.kernels.activate(self._linear(rows, mlp.gate_up)), mlp.down)

    def _delta(self, rows: Tensor, linear: Linear) -> Tensor:
        """Return the term that a product adds to hidden states, in their dtype."""
        return self._linear(rows, linear, wide=self.hidden_dtype == torch.float32)

    def _linear(self, rows: Tensor, linear: Linear, *, wide: bool = False) -> Tensor:
        """Multiply ``rows`` by a weight. The result has the rows' dtype or, if ``wide``, fp32.

        In deterministic mode, a row's result depends on that row alone.
        """
        if not self._deterministic or linear.row_by_row:
            return linear(rows, wide=wide)
        padded = functional.pad(rows, (0, 0, 0, -len(rows) % _DETERMINISTIC_ROWS))
        return torch.cat([linear(tile, wide=wide) for tile in padded.split(_DETERMINISTIC_ROWS)])[: len(rows)]  # type: ignore[no-untyped-call]


def _caches_of(config: ModelConfig) -> list[int]:
    """Return the number of each layer's cache. A layer that reads another layer's KV has the same number."""
    caches: list[int] = []
    num_caches = 0
    for layer in config.layers:
        if layer.reads is None:
            caches.append(num_caches)
            num_caches += 1
        else:
            caches.append(caches[layer.reads])
    return caches
