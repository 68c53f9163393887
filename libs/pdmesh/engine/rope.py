"""Rotary position embedding with the scalings of transformers, computed by the same formulas.

*dynamic* and *longrope* scaling depend on the sequence's length. Transformers rotates a token with the frequencies of
the length at which it is first computed. This is the prompt's length for prompt tokens, and the token's own position
for generated ones. Both follow from a position and the prompt's length alone, so chunking, transfers and restarts do
not change them.

The engine rotates the halves of whole heads. Other rotations (of neighbours, of a part of each head, in some layers
only) are mapped to this one. Weights are loaded in `rotation_order`, and dims without rotation rotate by an angle of
zero.

With fp32, everything is computed as in transformers. For half precision, fp64 is used: the last bits of torch's fp32
powers and cosines depend on the processor, which changes some bf16 values. Errors of fp64 do not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from pdmesh.engine.rope_config import RopeConfig, RopeType


class RotaryEmbedding:
    """Cosines and sines of positions for one model that computes in ``dtype``."""

    def __init__(
        self,
        config: RopeConfig | None,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        rotary_dim: int | None = None,
    ) -> None:
        self._config = config or RopeConfig()
        self._dtype = dtype
        self._exact = torch.float32 if dtype == torch.float32 else torch.float64
        #: Number of rotated dims of a head, 0 without a configuration.
        self._dim = (rotary_dim or head_dim) if config is not None else 0
        whole = self._dim
        if self._config.rope_type is RopeType.PROPORTIONAL:
            self._dim = 2 * int(self._config.rotated_share * head_dim // 2)
        self._num_still = (head_dim - self._dim) // 2
        #: Exponents of the base, (rotary_dim / 2,).
        self._exponents = torch.arange(0, self._dim, 2, dtype=self._exact, device=device) / max(1, whole)
        self._attention_factor = _attention_factor(self._config)
        self._inverse_frequencies = self._fixed_inverse_frequencies()
        is_longrope = self._config.rope_type is RopeType.LONGROPE
        self._long_inverse_frequencies = self._longrope(self._config.long_factors) if is_longrope else None
        self._tables: tuple[Tensor, Tensor] | None = None

    def tabulate(self, num_positions: int) -> None:
        """Store the results of `cos_sin` for positions before ``num_positions``, unless they depend on lengths, too."""
        if not self._config.depends_on_length:
            positions = torch.arange(num_positions, device=self._inverse_frequencies.device)
            self._tables = self.cos_sin(positions, positions)

    def cos_sin(self, positions: Tensor, num_prompt_tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines (n, head_dim / 2) for tokens at ``positions``, by their prompts' lengths."""
        if self._tables is not None:
            cos, sin = self._tables
            return cos[positions], sin[positions]
        frequencies = self._inverse_frequencies
        if self._config.depends_on_length:
            frequencies = self._inverse_frequencies_for(torch.maximum(positions + 1, num_prompt_tokens))
        angles = positions[:, None].to(self._exact) * frequencies
        cos, sin = angles.cos() * self._attention_factor, angles.sin() * self._attention_factor
        if self._num_still:
            cos, sin = functional.pad(cos, (0, self._num_still), value=1.0), functional.pad(sin, (0, self._num_still))
        return cos.to(self._dtype), sin.to(self._dtype)

    def _fixed_inverse_frequencies(self) -> Tensor:
        config = self._config
        inverse = 1.0 / (config.theta**self._exponents)
        match config.rope_type:
            case RopeType.DEFAULT | RopeType.DYNAMIC:  # dynamic ones differ only beyond the trained length
                return inverse
            case RopeType.LINEAR | RopeType.PROPORTIONAL:
                return inverse / config.factor
            case RopeType.LLAMA3:
                return _llama3(config, inverse)
            case RopeType.YARN:
                return self._yarn()
            case RopeType.LONGROPE:
                return self._longrope(config.short_factors)

    def _inverse_frequencies_for(self, lengths: Tensor) -> Tensor:
        """Return the inverse frequencies for sequences of ``lengths``, (n, rotary_dim / 2)."""
        factor, trained = self._config.factor, self._config.original_max_position_embeddings
        if self._long_inverse_frequencies is not None:
            return torch.where(lengths[:, None] > trained, self._long_inverse_frequencies, self._inverse_frequencies)
        stretch = (factor * lengths.clamp(min=trained).to(self._exact) / trained) - (factor - 1)  # NTK scaling
        bases = self._config.theta * stretch ** (self._dim / (self._dim - 2))
        return 1.0 / (bases[:, None] ** self._exponents)

    def _longrope(self, factors: tuple[float, ...]) -> Tensor:
        exponents = self._exponents
        return 1.0 / (exponents.new_tensor(factors) * self._config.theta**exponents)

    def _yarn(self) -> Tensor:
        config, dim = self._config, self._dim
        powers = config.theta**self._exponents
        extrapolation, interpolation = 1.0 / powers, 1.0 / (config.factor * powers)

        def correction_dim(num_rotations: float) -> float:
            turns = config.original_max_position_embeddings / (num_rotations * 2 * math.pi)
            return (dim * math.log(turns)) / (2 * math.log(config.theta))

        low, high = correction_dim(config.beta_fast), correction_dim(config.beta_slow)
        if config.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        if low == high:
            high += 0.001  # no division by zero
        ramp = torch.arange(dim // 2, dtype=self._exact, device=powers.device)
        keep = 1 - ((ramp - low) / (high - low)).clamp(0, 1)
        return interpolation * (1 - keep) + extrapolation * keep


def _llama3(config: RopeConfig, inverse: Tensor) -> Tensor:
    trained, low, high = config.original_max_position_embeddings, config.low_freq_factor, config.high_freq_factor
    wavelengths = 2 * math.pi / inverse
    scaled = torch.where(wavelengths > trained / low, inverse / config.factor, inverse)
    smooth = (trained / wavelengths - low) / (high - low)
    smoothed = (1 - smooth) * scaled / config.factor + smooth * scaled
    medium = (wavelengths >= trained / high) & (wavelengths <= trained / low)
    return torch.where(medium, smoothed, scaled)


def rotation_order(head_dim: int, rotary_dim: int, *, interleaves: bool) -> list[int] | None:
    """Return the order of a head's dims that puts the two dims of each rotated pair in the head's two halves.

    None means that they already are. With ``interleaves``, pairs are neighbours, otherwise the halves of the first
    ``rotary_dim`` dims.
    """
    if rotary_dim == head_dim and not interleaves:
        return None
    pairs, half = rotary_dim // 2, head_dim // 2
    first = [2 * pair for pair in range(pairs)] if interleaves else list(range(pairs))
    second = [dim + 1 if interleaves else dim + pairs for dim in first]
    rest = list(range(rotary_dim, head_dim))
    return [*first, *rest[: half - pairs], *second, *rest[half - pairs :]]


def gated_order(turned: Sequence[int], num_heads: int, num_kv_heads: int) -> list[int]:
    """Return the source of each row of queries, keys, values and gates. Files have a gate after each query.

    ``turned`` is the order of the dims of a rotated head.
    """
    head_dim, first = len(turned), 2 * num_heads * len(turned)
    queries = [2 * head * head_dim + dim for head in range(num_heads) for dim in turned]
    keys = [first + head * head_dim + dim for head in range(num_kv_heads) for dim in turned]
    gates = [(2 * head + 1) * head_dim + dim for head in range(num_heads) for dim in range(head_dim)]
    return [*queries, *keys, *range(first + len(keys), first + 2 * len(keys)), *gates]


def _attention_factor(config: RopeConfig) -> float:
    if config.rope_type not in (RopeType.YARN, RopeType.LONGROPE):
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.rope_type is RopeType.LONGROPE:
        if config.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(config.factor) / math.log(config.original_max_position_embeddings))

    def scale(mscale: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * mscale * math.log(config.factor) + 1.0

    if config.mscale and config.mscale_all_dim:
        return scale(config.mscale) / scale(config.mscale_all_dim)
    return scale(1.0)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads ``x`` (n, heads, head_dim) by tables (n, head_dim / 2). The halves of a head form the pairs."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
