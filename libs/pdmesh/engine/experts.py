"""Mixture of experts: each token goes through the few experts that its router chooses.

A token's result depends on its own hidden state alone, whatever else is in the batch. Tokens are grouped by expert, and
a token's experts are summed in the order of their numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pdmesh.engine.kernels import by_value
from pdmesh.engine.linear import Linear
from pdmesh.engine.model_config import ExpertsConfig


@dataclass(frozen=True, slots=True)
class Mlp:
    """A dense MLP; gate and up are fused in this order."""

    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Experts:
    """The MLPs of a layer, and the router that gives their shares for a token.

    ``scales`` (num_experts,) in fp32 multiply the shares. ``preferences`` (num_experts,) in fp32 are added to shares
    when experts are chosen. ``shared`` is an MLP of all tokens, and ``shared_gate`` the projection that gates it.
    """

    config: ExpertsConfig
    router: Linear
    mlps: tuple[Mlp, ...]
    scales: Tensor | None = None
    preferences: Tensor | None = None
    shared: Mlp | None = None
    shared_gate: Linear | None = None

    def route(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return the numbers of each row's experts and their shares in fp32, both (rows, num_per_token).

        Of equal shares, the expert with the lower number is chosen.
        """
        config = self.config
        shares = by_value(torch.sigmoid, scores.float()) if config.by_sigmoid else torch.softmax(scores.float(), dim=-1)
        ranked = shares if self.preferences is None else shares + self.preferences
        if config.num_groups > 1:
            ranked = _in_best_groups(ranked, config)
        numbers = ranked.argsort(dim=-1, descending=True, stable=True)[:, : config.num_per_token]
        chosen = shares.gather(1, numbers)
        if config.normalizes:
            chosen = chosen / (chosen.sum(dim=-1, keepdim=True) + config.epsilon)
        if config.scale != 1:
            chosen = chosen * config.scale
        return numbers, chosen if self.scales is None else chosen * self.scales[numbers]


class Multiply(Protocol):
    """Multiplies rows by a layer's weight."""

    def __call__(self, rows: Tensor, linear: Linear, /, *, wide: bool = False) -> Tensor:
        """Return the products in the rows' dtype or, if ``wide``, in fp32."""
        ...


def mix_experts(
    experts: Experts,
    rows: Tensor,
    linear: Multiply,
    mlp: Callable[[Tensor, Mlp], Tensor],
    *,
    routed: Tensor | None = None,
) -> Tensor:
    """Return each row's sum of experts' results by their shares and of the shared MLP's, in fp32.

    ``linear`` and ``mlp`` take rows. ``routed`` are the router's rows if they are not the experts'.
    """
    scores = linear(rows if routed is None else routed, experts.router, wide=experts.config.routes_in_fp32)
    numbers, shares = experts.route(scores)
    # Places of rows in the flattened numbers, one for each expert of a row, sorted by expert.
    by_expert = numbers.flatten().argsort(stable=True)
    counts = numbers.flatten().bincount(minlength=len(experts.mlps)).tolist()
    total = rows.new_zeros(rows.shape, dtype=torch.float32)
    for expert, places in zip(experts.mlps, by_expert.split(counts), strict=True):  # type: ignore[no-untyped-call]
        if len(places):
            own = places // experts.config.num_per_token
            total.index_add_(0, own, mlp(rows[own], expert).float() * shares.flatten()[places, None])
    if experts.shared is not None:
        given = mlp(rows, experts.shared).float()
        if experts.shared_gate is not None:
            given = given * by_value(torch.sigmoid, linear(rows, experts.shared_gate).float())
        total += given
    return total


def _in_best_groups(ranked: Tensor, config: ExpertsConfig) -> Tensor:
    """Return the shares (rows, num_experts), and -inf for experts outside the row's best groups."""
    grouped = ranked.view(len(ranked), config.num_groups, -1)
    sums = grouped.topk(2, dim=-1).values.sum(dim=-1)
    best = sums.argsort(dim=-1, descending=True, stable=True)[:, : config.num_chosen_groups]
    is_left_out = torch.ones_like(sums, dtype=torch.bool).scatter_(1, best, False)
    return grouped.masked_fill(is_left_out[..., None], -torch.inf).flatten(1)
