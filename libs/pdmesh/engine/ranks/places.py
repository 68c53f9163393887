"""Places of the ranks' exchanges in the memory that all ranks of an instance map."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from pdmesh.engine.ranks.channel import CHANNEL_BYTES
from pdmesh.engine.ranks.group import EXCHANGE_BYTES
from pdmesh.engine.ranks.share import RankShare


def exchange_bytes(num_ranks: int, num_stages: int) -> int:
    """Return the size of the memory for ``num_stages`` stages of ``num_ranks`` ranks each."""
    channels = num_ranks * num_stages * CHANNEL_BYTES if num_stages > 1 else 0
    return num_stages * EXCHANGE_BYTES + channels


def group_memory(memory: Tensor, stage: int) -> Tensor:
    """Return the memory of the exchange among the ranks of a stage."""
    return memory[stage * EXCHANGE_BYTES :][:EXCHANGE_BYTES]


def outlet_memory(memory: Tensor, share: RankShare) -> Tensor:
    """Return the memory of a rank's channel to the next stage, or to the leader."""
    first = share.num_stages * EXCHANGE_BYTES + (share.stage * share.num_ranks + share.rank) * CHANNEL_BYTES
    return memory[first:][:CHANNEL_BYTES]


def inlet_memory(memory: Tensor, share: RankShare) -> Tensor:
    """Return the memory of a rank's channel from the stage before."""
    return outlet_memory(memory, replace(share, stage=share.stage - 1))
