"""Parameters of rotary embeddings. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class RopeType(StrEnum):
    """Kind of RoPE scaling; see `pdmesh.engine.rope`."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"
    PROPORTIONAL = "proportional"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Parameters of a rotary embedding. Which fields apply depends on ``rope_type``.

    ``attention_factor`` applies to yarn and longrope; None derives it from the factor and mscale. ``short_factors`` and
    ``long_factors`` have a divisor for each frequency: up to the original context length, and beyond it.
    """

    rope_type: RopeType = RopeType.DEFAULT
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float | None = None  # yarn, longrope
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn
    short_factors: tuple[float, ...] = ()  # longrope
    long_factors: tuple[float, ...] = ()  # longrope
    rotated_share: float = 1.0  # proportional

    @property
    def depends_on_length(self) -> bool:
        """Whether a token's rotation also depends on the length of its sequence."""
        return self.rope_type in (RopeType.DYNAMIC, RopeType.LONGROPE)
