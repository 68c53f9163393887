"""Weights of a model in memory, in the form that its computation reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pdmesh.engine.experts import Experts, Mlp
from pdmesh.engine.linear import Linear, Vocabulary
from pdmesh.engine.ranks.rank_linear import GatheredHeads


class Norm(NamedTuple):
    """Weights of a norm. They are fp32 on CPUs, and for models that multiply before rounding."""

    weight: Tensor
    bias: Tensor | None


class HeadNorm(NamedTuple):
    """The norm of queries or keys: one per head, or one over all of a token's heads (`QkNorm.ALL_HEADS`).

    ``gathered`` is set if the norm is over all heads and each rank has some of them.
    """

    norm: Norm
    gathered: GatheredHeads | None


class ExpertsBeside(NamedTuple):
    """Experts beside a layer's dense MLP, and the norms of both. Their router has a norm of its own."""

    experts: Experts
    norm: Norm
    router_norm: Norm
    mlp_output_norm: Norm
    output_norm: Norm


class ConvTaps(NamedTuple):
    """Factors of a convolution (num_taps, channels) in fp32, the token's own first, and biases."""

    factors: Tensor
    bias: Tensor | None


class DeltaWeights(NamedTuple):
    """Weights of a gated delta net in fp32: factors of a convolution as in `ConvTaps`, decays, and the last norm.

    ``decay_rates`` multiply a token's step. An additive layer may have biases of the convolution, and has factors by
    which values are added to results.
    """

    taps: Tensor
    decay_rates: Tensor
    decay_bias: Tensor
    norm: Norm
    taps_bias: Tensor | None = None
    skip: Tensor | None = None


class LatentWeights(NamedTuple):
    """Weights of latent attention. ``keys`` and ``values`` have a projection for each head.

    ``keys`` take a query to the latents' space, and ``values`` a result out of it. ``query`` and its norm are None if
    queries are products of hidden states.
    """

    norm: Norm
    keys: tuple[Linear, ...]
    values: tuple[Linear, ...]
    query: Linear | None
    query_norm: Norm | None


class LayerInput(NamedTuple):
    """Weights that add a token's embedding for one layer to the layer's result."""

    gate: Linear
    output: Linear
    norm: Norm


class LayerInputs(NamedTuple):
    """Table of a token's embeddings for each layer, and the projection of the model's embedding beside them."""

    table: Vocabulary
    projection: Linear
    norm: Norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixer:
    """Weights of a layer's attention, or of the convolution in its place.

    ``qkv`` fuses queries, keys and values in this order. Rows of queries and keys are in
    `pdmesh.engine.rope.rotation_order`. With ``taps``, it fuses a gate of the convolution's inputs, a gate of its
    results, and the inputs. With ``delta``, it fuses a gate of the results, the convolution's inputs, and inputs of
    updates and decays. With ``latent``, it fuses queries or their latent, and the latent of keys and values. With gated
    attention, gates follow values. ``sinks`` has one value per head, in fp32.
    """

    qkv: Linear
    output: Linear
    q_norm: HeadNorm | None = None
    k_norm: HeadNorm | None = None
    v_norm: Norm | None = None
    sinks: Tensor | None = None
    taps: ConvTaps | None = None
    delta: DeltaWeights | None = None
    latent: LatentWeights | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Weights of one transformer layer. An absent norm or MLP is None. ``scale`` (1,) in fp32 multiplies the result."""

    input_norm: Norm | None
    mixer: Mixer
    attention_output_norm: Norm | None
    mlp_norm: Norm | None
    mlp: Mlp | Experts | None
    mlp_output_norm: Norm | None
    experts_beside: ExpertsBeside | None = None
    own_input: LayerInput | None = None
    scale: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """All weights, in the dtype and on the device of the computation. A tied ``lm_head`` is the embedding itself.

    A stage has some of the layers. ``embedding`` and ``positions`` (learned ones) are needed in the first stage, and
    ``lm_head`` in the last. ``scales_sums``: kernels multiply integer codes, and scale the sums.
    """

    embedding: Vocabulary | None
    positions: Tensor | None
    layers: tuple[LayerWeights, ...]
    norm: Norm
    lm_head: Vocabulary | None
    scales_sums: bool
    dtype: torch.dtype
    device: torch.device
    layer_inputs: LayerInputs | None = None
