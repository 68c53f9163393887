"""Weights of a model or of a rank's share, from stored tensors, as layers compute with them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from pdmesh.engine.experts import Experts, Mlp
from pdmesh.engine.grouped import GroupedWeight, join_rows
from pdmesh.engine.latent import Latent
from pdmesh.engine.levels import KernelLibrary
from pdmesh.engine.linear import Linear, PlainLinear, Vocabulary, WeightMemory, fastest_linear, fastest_vocabulary
from pdmesh.engine.model_config import ExpertsConfig, LayerConfig, LayerEmbedding, ModelConfig, QkNorm, ShortConv
from pdmesh.engine.packed import joined_linear, packed_linear
from pdmesh.engine.ranks.group import RankGroup
from pdmesh.engine.ranks.rank_linear import GatheredHeads, GatheredLinear, GatheredVocabulary, own_of_halves
from pdmesh.engine.ranks.share import RankShare
from pdmesh.engine.rope import gated_order, rotation_order
from pdmesh.engine.state_sizes import DeltaNet
from pdmesh.engine.tensors import Tensors
from pdmesh.engine.weights import (
    ConvTaps,
    DeltaWeights,
    ExpertsBeside,
    HeadNorm,
    LatentWeights,
    LayerInput,
    LayerInputs,
    LayerWeights,
    Mixer,
    ModelWeights,
    Norm,
)
from pdmesh.kv_layout import IndexRange

#: Source row of each row of a weight. None keeps the stored order.
Order = Sequence[int] | None


class _Place(NamedTuple):
    """The part of a stored tensor that contributes to a linear layer.

    ``name`` is without ``.weight`` or ``.bias``. ``rows`` are the rows that are used; None means all ``num_outputs``.
    """

    name: str
    num_outputs: int
    rows: IndexRange | None

    @property
    def size(self) -> int:
        return self.num_outputs if self.rows is None else self.rows.size


@dataclass(frozen=True, slots=True)
class WeightReader:
    """Reader of a rank's ``share`` of the weights that ``config`` requires, as `load_weights` describes."""

    config: ModelConfig
    tensors: Tensors
    dtype: torch.dtype
    device: torch.device
    packed: bool
    library: KernelLibrary | None
    group: RankGroup | None
    share: RankShare
    memory: WeightMemory = field(default_factory=WeightMemory)

    def model(self) -> ModelWeights:
        config, names, share = self.config, self.config.names, self.share
        vocabulary = (config.vocab_size, config.hidden_size)
        scores_as_embedded = share.is_last and config.tie_word_embeddings
        embedding = positions = None
        if share.is_first or scores_as_embedded:
            embedding = self._vocabulary(f"{names.embedding}.weight", vocabulary, multiplies=scores_as_embedded)
        if share.is_first and config.num_learned_positions:
            positions = self._tensor(f"{names.positions}.weight", (config.num_learned_positions, config.hidden_size))
        return ModelWeights(
            embedding=embedding,
            positions=positions,
            layers=tuple(
                self._layer(number, config.layers[number]) for number in range(*share.layers(config.num_layers))
            ),
            norm=self._norm(names.norm, config.hidden_size),
            lm_head=(
                self._vocabulary(f"{names.lm_head}.weight", vocabulary, multiplies=True)
                if share.is_last and not scores_as_embedded
                else embedding
            ),
            scales_sums=self.keeps_packed and config.quantization is not None and config.quantization.has_integers,
            dtype=self.dtype,
            device=self.device,
            layer_inputs=self._layer_inputs(),
        )

    def _layer_inputs(self) -> LayerInputs | None:
        config, names, sizes = self.config, self.config.names, self.config.embedding_by_layer
        if sizes is None:
            return None
        num_values = config.num_layers * sizes.size
        table = self._vocabulary(f"{names.layer_embedding}.weight", (sizes.vocab_size, num_values), multiplies=False)
        prefix, _, name = names.layer_input.rpartition(".")
        projection = self._linear(prefix, (name,), [num_values], config.hidden_size)
        return LayerInputs(table, projection, self._norm(names.layer_input_norm, sizes.size))

    def _layer(self, number: int, layer: LayerConfig) -> LayerWeights:
        config, names = self.config, self.config.names
        prefix, after = (names.layer.format(each) for each in layer.stored_as or (number, number))

        def norm(prefix: str, name: str | None) -> Norm | None:
            return None if name is None else self._norm(f"{prefix}.{name}", config.hidden_size)

        mlp: Mlp | Experts | None = None
        if layer.has_dense_mlp:
            mlp = self._mlp(after, names.gate_up, names.down, config.inner_size(layer), has_bias=config.mlp_bias)
        elif layer.experts is not None:
            mlp = self._experts(after, layer.experts)
        return LayerWeights(
            input_norm=norm(prefix, names.input_norm),
            mixer=self._mixer(prefix, layer),
            attention_output_norm=norm(prefix, names.attention_output_norm),
            mlp_norm=norm(after, names.mlp_norm) if mlp is not None else None,
            mlp=mlp,
            mlp_output_norm=norm(prefix, names.mlp_output_norm),
            experts_beside=self._experts_beside(prefix, layer.experts),
            own_input=self._layer_input(prefix, config.embedding_by_layer),
            scale=self._tensor(f"{prefix}.{names.layer_scale}", (1,), torch.float32) if config.scales_layers else None,
        )

    def _mixer(self, prefix: str, layer: LayerConfig) -> Mixer:
        if layer.delta is not None:
            return self._delta_net(prefix, layer.delta)
        if layer.latent is not None:
            return self._latent(prefix, layer.latent)
        return self._attention(prefix, layer) if layer.conv is None else self._conv(prefix, layer.conv)

    def _delta_net(self, prefix: str, delta: DeltaNet) -> Mixer:
        names, hidden, num_heads = self.config.names, self.config.hidden_size, delta.num_value_heads

        def vector(name: str, size: int) -> Tensor:
            return self._tensor(f"{prefix}.{name}", (size,), torch.float32)

        (sizes, order), channels = delta.projections(len(names.delta_in)), delta.channel_order()
        norm_size, skip = delta.value_dim, None
        if delta.is_additive:
            norm_size, skip = delta.num_values, vector(names.delta_skip, num_heads)
        bias = vector(f"{names.delta_conv}.bias", delta.num_channels) if delta.has_conv_bias else None
        taps = self._taps(f"{prefix}.{names.delta_conv}", delta.num_channels, delta.num_taps)
        return Mixer(
            qkv=self._linear(prefix, names.delta_in, sizes, hidden, order=order),
            output=self._linear(prefix, (names.delta_out,), [hidden], delta.num_values),
            delta=DeltaWeights(
                taps if taps.is_meta else taps[:, channels].contiguous(),
                vector(names.decay_log, num_heads).double().exp().float(),  # the same on every processor
                vector(names.decay_bias, num_heads),
                Norm(vector(f"{names.delta_norm}.weight", norm_size), None),
                bias if bias is None or bias.is_meta else bias[channels],
                skip,
            ),
        )

    def _taps(self, name: str, num_channels: int, num_taps: int) -> Tensor:
        """Return the factors of a convolution (taps, channels), the token's own first."""
        stored = self._tensor(f"{name}.weight", (num_channels, 1, num_taps), torch.float32)
        return stored[:, 0].flip(1).t().contiguous()

    def _attention(self, prefix: str, layer: LayerConfig) -> Mixer:
        config, names = self.config, self.config.names
        num_kv_heads, head_dim = config.page(layer)
        own_heads = self.share.heads(config), self.share.kv_heads_of(num_kv_heads)
        query, key = (heads.scaled(head_dim) for heads in own_heads)
        num_kv = 0 if layer.reads is not None else 1 if layer.keys_are_values else 2
        k_norm = v_norm = None
        if num_kv:
            k_norm = self._head_norm(f"{prefix}.{names.k_norm}", num_kv_heads, head_dim, RankShare.kv_heads)
            v_norm = Norm(torch.ones(head_dim, device=self.device), None) if config.norms_values else None
        return Mixer(
            qkv=self._linear(
                prefix,
                names.qkv[: 1 + num_kv],
                [(1 + config.gates_attention) * config.num_heads * head_dim, *[num_kv_heads * head_dim] * num_kv],
                config.hidden_size,
                own=[query, *[key] * num_kv],
                has_bias=config.qkv_bias,
                order=self._qkv_order(layer, num_kv),
            ),
            output=self._gathered(
                prefix, names.output, [query.size] * self.share.num_ranks, has_bias=config.output_bias
            ),
            q_norm=self._head_norm(f"{prefix}.{names.q_norm}", config.num_heads, head_dim, RankShare.heads),
            k_norm=k_norm,
            v_norm=v_norm,
            sinks=self._sinks(f"{prefix}.{names.sinks}") if config.has_sinks else None,
        )

    def _latent(self, prefix: str, latent: Latent) -> Mixer:
        names, num_heads, hidden = self.config.names, self.config.num_heads, self.config.hidden_size
        query_rank, num_queries = latent.query_rank, num_heads * latent.query_dim
        turned = self._rotation_order(latent.rotated_dim, 1) or range(latent.rotated_dim)
        queries, fused = latent.orders(num_heads, list(turned))
        names_in = names.latent_in if query_rank else (names.qkv[0], names.latent_in[1])
        query = query_norm = None
        if query_rank:
            query = self._linear(prefix, (names.queries,), [num_queries], query_rank, order=queries)
            query_norm = self._norm(f"{prefix}.{names.query_latent_norm}", query_rank)
        return Mixer(
            qkv=self._linear(prefix, names_in, [query_rank or num_queries, latent.width], hidden, order=fused),
            output=self._linear(prefix, (names.output,), [hidden], num_heads * latent.value_dim),
            latent=LatentWeights(
                self._norm(f"{prefix}.{names.latent_norm}", latent.rank),
                *self._by_head(prefix, latent),
                query,
                query_norm,
            ),
        )

    def _by_head(self, prefix: str, latent: Latent) -> tuple[tuple[Linear, ...], tuple[Linear, ...]]:
        """Return each head's projection of keys, transposed, and each head's projection of values."""
        names, num_heads, rank = self.config.names.keys_and_values, self.config.num_heads, latent.rank
        if len(names) == 2:
            keys, values = (
                tuple(self._linear(prefix, (f"{name}.{head}",), [outputs], inputs) for head in range(num_heads))
                for name, outputs, inputs in zip(names, (rank, latent.value_dim), (latent.plain_dim, rank), strict=True)
            )
            return keys, values
        stored = self._tensor(f"{prefix}.{names[0]}.weight", (num_heads * (latent.plain_dim + latent.value_dim), rank))
        whole = stored.view(num_heads, -1, rank).tensor_split((latent.plain_dim,), dim=1)
        keys, values = (
            tuple(self._product(each.contiguous(), None) for each in heads)
            for heads in (whole[0].transpose(1, 2), whole[1])
        )
        return keys, values

    def _conv(self, prefix: str, conv: ShortConv) -> Mixer:
        names, hidden, share, has_bias = self.config.names, self.config.hidden_size, self.share, conv.has_bias
        half, own = hidden // 2, share.half_channels(hidden)
        factors = own_of_halves(self._taps(f"{prefix}.{names.conv}", hidden, conv.num_taps), own)
        bias = self._tensor(f"{prefix}.{names.conv}.bias", (hidden,), torch.float32) if has_bias else None
        return Mixer(
            qkv=self._linear(prefix, (names.conv_in,), [half] * 6, hidden, own=[own] * 6, has_bias=has_bias),
            output=self._gathered(prefix, names.conv_out, [2 * own.size] * share.num_ranks, 2, has_bias=has_bias),
            taps=ConvTaps(factors, None if bias is None else own_of_halves(bias, own)),
        )

    def _experts_beside(self, prefix: str, experts: ExpertsConfig | None) -> ExpertsBeside | None:
        if experts is None or not experts.is_beside_mlp:
            return None
        names, hidden = self.config.names, self.config.hidden_size
        router_scale = self._tensor(f"{prefix}.{names.router_scale}", (hidden,), torch.float32) * hidden**-0.5
        scales = self._tensor(f"{prefix}.{names.expert_scales}", (experts.num_experts,), torch.float32)
        return ExpertsBeside(
            replace(self._experts(prefix, experts), scales=scales),
            self._norm(f"{prefix}.{names.experts_norm}", hidden),
            Norm(router_scale, None),
            self._norm(f"{prefix}.{names.mlp_own_norm}", hidden),
            self._norm(f"{prefix}.{names.experts_own_norm}", hidden),
        )

    def _layer_input(self, prefix: str, sizes: LayerEmbedding | None) -> LayerInput | None:
        if sizes is None:
            return None
        names, hidden = self.config.names, self.config.hidden_size
        return LayerInput(
            self._linear(prefix, (names.layer_gate,), [sizes.size], hidden),
            self._linear(prefix, (names.layer_output,), [hidden], sizes.size),
            self._norm(f"{prefix}.{names.layer_output_norm}", hidden),
        )

    def _mlp(self, prefix: str, gate_up: tuple[str, ...], down: str, inner: int, *, has_bias: bool) -> Mlp:
        config = self.config
        num_gates = 2 if config.is_gated else 1
        own = [self.share.outputs(inner)] * num_gates
        return Mlp(
            self._linear(prefix, gate_up, [inner] * num_gates, config.hidden_size, own=own, has_bias=has_bias),
            self._gathered(prefix, down, self.share.widths(inner), has_bias=has_bias),
        )

    def _experts(self, prefix: str, experts: ExpertsConfig) -> Experts:
        names, hidden = self.config.names, self.config.hidden_size
        prefixes = [f"{prefix}.{names.expert.format(number)}" for number in range(experts.num_experts)]
        preferences, sizes = f"{prefix}.{names.preferences}", (experts.num_experts,)
        # oneDNN's products, used without a library, are rounded
        unrounded = replace(self, packed=False) if experts.routes_in_fp32 and self.library is None else self
        return Experts(
            experts,
            unrounded._linear(prefix, (names.router,), [experts.num_experts], hidden, has_bias=experts.has_bias),
            tuple(
                self._mlp(
                    each,
                    names.expert_gate_up,
                    names.expert_down,
                    experts.intermediate_size,
                    has_bias=experts.has_bias or self.config.mlp_bias,
                )
                for each in prefixes
            ),
            preferences=self._tensor(preferences, sizes, torch.float32) if experts.has_preferences else None,
            shared=self._shared(prefix, experts.shared_size),
            shared_gate=self._linear(prefix, (names.shared_gate,), [1], hidden) if experts.gates_shared else None,
        )

    def _shared(self, prefix: str, size: int) -> Mlp | None:
        names = self.config.names
        return self._mlp(prefix, names.shared_gate_up, names.shared_down, size, has_bias=False) if size else None

    def _gathered(self, prefix: str, name: str, inputs: Sequence[int], groups: int = 1, *, has_bias: bool) -> Linear:
        """Return a projection to the hidden states; ``inputs`` has each rank's number, in ``groups``."""
        num_outputs, own = self.config.hidden_size, [self.share.outputs(self.config.hidden_size)]
        linear = self._linear(prefix, (name,), [num_outputs], sum(inputs), own=own, has_bias=has_bias)
        if self.group is None:
            return linear
        return GatheredLinear(linear, self.group, inputs, self.share.widths(num_outputs), groups)

    def _qkv_order(self, layer: LayerConfig, num_kv: int) -> Order:
        """Return the source of each row of this rank's fused queries, keys and values, or None for the stored order.

        ``num_kv`` is the number of projections beside the queries': keys, or keys and values.
        """
        num_kv_heads, head_dim = self.share.page_of(self.config.page(layer))
        num_heads = self.share.heads(self.config).size
        if self.config.gates_attention:
            turned = self._rotation_order(head_dim, 1) or range(head_dim)
            return gated_order(turned, num_heads, num_kv_heads)
        rows = self._rotation_order(head_dim, num_heads + min(1, num_kv) * num_kv_heads)
        if rows is None:
            return None
        assert not layer.keys_are_values, "values are not rotated, so they keep the stored order"
        return [*rows, *range(len(rows), len(rows) + (num_kv - 1) * num_kv_heads * head_dim)]

    def _rotation_order(self, head_dim: int, num_heads: int) -> Order:
        """Return the source of each row of ``num_heads`` rotated heads, or None for the stored order."""
        config = self.config
        order = rotation_order(head_dim, config.rotary_dim or head_dim, interleaves=config.interleaves_rotation)
        return None if order is None else [head * head_dim + dim for head in range(num_heads) for dim in order]

    def _linear(
        self,
        prefix: str,
        names: tuple[str, ...],
        sizes: Sequence[int],
        num_inputs: int,
        *,
        own: Sequence[IndexRange] | None = None,
        has_bias: bool = False,
        order: Order = None,
    ) -> Linear:
        """Return one layer of fused projections of the same input. Their numbers of outputs are ``sizes``.

        ``names`` has one tensor for each projection, or one for all. ``own`` are the outputs of each projection that
        this rank computes; None means all. Rows are permuted by ``order``.
        """
        parts = [IndexRange(0, sum(sizes))]
        if own is not None and not self.share.is_whole:
            parts = [part.moved(first) for part, first in zip(own, accumulate(sizes, initial=0), strict=False)]
        if len(names) == 1:
            sizes = [sum(sizes)]
        outputs = {f"{prefix}.{name}": size for name, size in zip(names, sizes, strict=True)}
        for name, num_outputs in outputs.items():
            self.tensors.check(f"{name}.weight", self._stored_shape(num_outputs, num_inputs))
        places: list[_Place] = []
        first = 0
        for name, num_outputs in outputs.items():
            whole = IndexRange(first, first + num_outputs)
            for part in filter(lambda part: part.size, [whole.common(part) for part in parts]):
                places.append(_Place(name, num_outputs, None if part == whole else part.moved(-first)))
            first += num_outputs
        bias = None
        if has_bias:
            bias = torch.empty(sum(place.size for place in places), dtype=self.dtype, device=self.device)
            torch.cat(
                [self.tensors.read(f"{name}.bias", (size,), rows).to(bias) for name, size, rows in places], out=bias
            )
            bias = bias if order is None or bias.is_meta else bias[order]
        return self._packed(places, num_inputs, bias, order) or self._plain(places, num_inputs, bias, order)

    def _plain(self, places: Sequence[_Place], num_inputs: int, bias: Tensor | None, order: Order) -> Linear:
        weight = torch.empty(sum(place.size for place in places), num_inputs, dtype=self.dtype, device=self.device)
        row = 0
        for place in places:
            weight[row : row + place.size] = self._matrix(
                f"{place.name}.weight", place.num_outputs, num_inputs, place.rows
            )
            row += place.size
        if order is not None and not weight.is_meta:  # indexing a meta tensor imports sympy
            weight = weight[order]
        return self._product(weight, bias)

    def _product(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return fastest_linear(weight, bias, self.memory, self.library) if self.packed else PlainLinear(weight, bias)

    def _packed(self, places: Sequence[_Place], num_inputs: int, bias: Tensor | None, order: Order) -> Linear | None:
        """Return the projections with their weights still quantised; None if one is plain, or no kernel takes it."""
        if not self.keeps_packed:
            return None
        weights: list[GroupedWeight] = []
        for place in places:
            weight = self.tensors.grouped(f"{place.name}.weight", (place.num_outputs, num_inputs), place.rows)
            if weight is None:
                return None
            weights.append(weight)
        if order is not None:
            firsts = [0, *accumulate(place.size for place in places)]
            runs = groupby(order, lambda row: bisect_right(firsts, row) - 1)
            weights = [weights[number].rows(torch.tensor(list(run)) - firsts[number]) for number, run in runs]
        return self._joined(join_rows(weights), bias)

    def _joined(self, weights: Sequence[GroupedWeight], bias: Tensor | None) -> Linear:
        assert self.library is not None
        parts: list[Linear] = []
        first = 0
        for weight in weights:
            size = len(weight.codes)
            own_bias = None if bias is None else bias[first : first + size]
            parts.append(packed_linear(weight, own_bias, self.memory, self.library))
            first += size
        return joined_linear(parts)

    @property
    def keeps_packed(self) -> bool:
        """Whether quantised weights stay quantised, for kernels that multiply them as they are."""
        return (
            self.packed
            and self.library is not None
            and self.config.quantization is not None
            and not self.config.transposes_weights
        )

    def _stored_shape(self, num_outputs: int, num_inputs: int) -> tuple[int, int]:
        return (num_inputs, num_outputs) if self.config.transposes_weights else (num_outputs, num_inputs)

    def _matrix(self, name: str, num_outputs: int, num_inputs: int, rows: IndexRange | None) -> Tensor:
        """Return a weight (num_outputs, num_inputs), or some of its rows."""
        shape = self._stored_shape(num_outputs, num_inputs)
        if not self.config.transposes_weights:
            return self.tensors.read(name, shape, rows)
        weight = self.tensors.read(name, shape).t()
        return weight if rows is None else weight[slice(*rows)]

    def _vocabulary(self, name: str, shape: tuple[int, ...], *, multiplies: bool) -> Vocabulary:
        rows = None if self.group is None else self.share.outputs(shape[0])
        own = self._own_vocabulary(name, shape, rows, multiplies=multiplies)
        return own if self.group is None else GatheredVocabulary(own, self.group, self.share.widths(shape[0]))

    def _own_vocabulary(
        self, name: str, shape: tuple[int, ...], rows: IndexRange | None, *, multiplies: bool
    ) -> Vocabulary:
        if self.keeps_packed and self.library is not None:
            self.tensors.check(name, shape)
            if (quantized := self.tensors.grouped(name, shape, rows)) is not None:
                return packed_linear(quantized, None, self.memory, self.library)
        weight = self._tensor(name, shape, rows=rows)
        if self.packed and multiplies:
            return fastest_vocabulary(weight, self.memory, self.library)
        return PlainLinear(weight, None)

    def _sinks(self, name: str) -> Tensor:
        heads = None if self.share.is_whole else self.share.heads(self.config)
        return self._tensor(name, (self.config.num_heads,), torch.float32, heads)

    def _norm(self, name: str, size: int, order: Order = None) -> Norm:
        kind = self.config.norm
        is_wide = kind.in_float32 or self.device.type == "cpu"
        weight = self._tensor(f"{name}.weight", (size,), torch.float32 if is_wide else None)
        if kind.offset:
            weight += kind.offset
        bias = self._tensor(f"{name}.bias", (size,)) if kind.has_bias else None
        if order is None or weight.is_meta:
            return Norm(weight, bias)
        return Norm(weight[order], None if bias is None else bias[order])

    def _head_norm(
        self, name: str, num_heads: int, head_dim: int, heads_of: Callable[[RankShare, ModelConfig], IndexRange]
    ) -> HeadNorm | None:
        """Return the norm of queries or keys; None if the model has none.

        A norm over all ``num_heads`` heads gathers them from all ranks: ``heads_of`` returns each rank's heads.
        """
        match self.config.qk_norm:
            case QkNorm.NONE:
                return None
            case QkNorm.HEAD:
                return HeadNorm(self._norm(name, head_dim, self._rotation_order(head_dim, 1)), None)
            case QkNorm.ALL_HEADS:
                norm = self._norm(name, num_heads * head_dim, self._rotation_order(head_dim, num_heads))
                if self.group is None:
                    return HeadNorm(norm, None)
                heads = [heads_of(share, self.config) for share in self.share.of_all_ranks]
                return HeadNorm(norm, GatheredHeads(self.group, heads))

    def _tensor(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None, rows: IndexRange | None = None
    ) -> Tensor:
        # Copy, because the file's mapping is closed after loading.
        return self.tensors.read(name, shape, rows).to(device=self.device, dtype=dtype or self.dtype, copy=True)
