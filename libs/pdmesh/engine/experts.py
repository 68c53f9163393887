"""Mixture of experts: each token goes through the few experts that its router chooses.

A token's result depends on its own hidden state alone, whatever else is in the batch. Tokens are grouped by expert, and
a token's experts are summed in the order of their numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pdmesh.engine.linear import Linear
from pdmesh.engine.model_config import ExpertsConfig


@dataclass(frozen=True, slots=True)
class Mlp:
    """A dense MLP; gate and up are fused in this order."""

    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Experts:
    """The MLPs of a layer, and the router that gives their shares for a token."""

    config: ExpertsConfig
    router: Linear
    mlps: tuple[Mlp, ...]


def route(scores: Tensor, config: ExpertsConfig) -> tuple[Tensor, Tensor]:
    """Return the numbers of each row's experts and their shares in fp32, both (rows, num_per_token).

    Of equal shares, the expert with the lower number is chosen.
    """
    shares = torch.softmax(scores.float(), dim=-1)
    ordered, numbers = shares.sort(dim=-1, descending=True, stable=True)
    chosen, numbers = ordered[:, : config.num_per_token], numbers[:, : config.num_per_token]
    if config.normalizes:
        chosen = chosen / chosen.sum(dim=-1, keepdim=True)
    return numbers, chosen


def mix_experts(
    experts: Experts, rows: Tensor, linear: Callable[[Tensor, Linear], Tensor], mlp: Callable[[Tensor, Mlp], Tensor]
) -> Tensor:
    """Return each row's sum of experts' results by their shares, in fp32. ``linear`` and ``mlp`` take rows."""
    numbers, shares = route(linear(rows, experts.router), experts.config)
    # Places of rows in the flattened numbers, one for each expert of a row, sorted by expert.
    by_expert = numbers.flatten().argsort(stable=True)
    counts = numbers.flatten().bincount(minlength=len(experts.mlps)).tolist()
    total = rows.new_zeros(rows.shape, dtype=torch.float32)
    for expert, places in zip(experts.mlps, by_expert.split(counts), strict=True):  # type: ignore[no-untyped-call]
        if len(places):
            own = places // experts.config.num_per_token
            total.index_add_(0, own, mlp(rows[own], expert).float() * shares.flatten()[places, None])
    return total
