"""Rotary position embedding with the scalings of transformers, computed with its own formulas.

*dynamic* scaling depends on the sequence's length. Transformers rotates a token with the frequencies of the length at
the time it is first computed: the whole prompt's for prompt tokens, its own position's for generated ones. Both
follow from a position and the prompt's length alone, so chunking, transfers and restarts do not change them.

In fp32 everything is computed as transformers does. For half precision it is computed in fp64: torch's fp32 powers and
cosines differ in the last bit from processor to processor, which shows in some bf16 value; errors of fp64 do not.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pdmesh.engine.model_config import RopeConfig, RopeType


class RotaryEmbedding:
    """Cosines and sines of positions for one model that computes in ``dtype``."""

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device, dtype: torch.dtype) -> None:
        self._config = config
        self._dtype = dtype
        self._exact = torch.float32 if dtype == torch.float32 else torch.float64
        #: Exponents of the base, (head_dim / 2,).
        self._exponents = torch.arange(0, head_dim, 2, dtype=self._exact, device=device) / head_dim
        self._head_dim = head_dim
        self._attention_factor = _yarn_attention_factor(config) if config.rope_type is RopeType.YARN else 1.0
        self._inverse_frequencies = self._fixed_inverse_frequencies()
        self._tables: tuple[Tensor, Tensor] | None = None

    def tabulate(self, num_positions: int) -> None:
        """Keep what `cos_sin` gives for positions before ``num_positions``, unless it depends on lengths, too."""
        if self._config.rope_type is not RopeType.DYNAMIC:
            positions = torch.arange(num_positions, device=self._inverse_frequencies.device)
            self._tables = self.cos_sin(positions, positions)

    def cos_sin(self, positions: Tensor, num_prompt_tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Tables for tokens at ``positions`` of sequences with ``num_prompt_tokens``: two of (n, head_dim / 2)."""
        if self._tables is not None:
            cos, sin = self._tables
            return cos[positions], sin[positions]
        frequencies = self._inverse_frequencies
        if self._config.rope_type is RopeType.DYNAMIC:
            frequencies = self._dynamic_inverse_frequencies(torch.maximum(positions + 1, num_prompt_tokens))
        angles = positions[:, None].to(self._exact) * frequencies
        cos, sin = angles.cos() * self._attention_factor, angles.sin() * self._attention_factor
        return cos.to(self._dtype), sin.to(self._dtype)

    def _fixed_inverse_frequencies(self) -> Tensor:
        config = self._config
        inverse = 1.0 / (config.theta**self._exponents)
        match config.rope_type:
            case RopeType.DEFAULT | RopeType.DYNAMIC:  # dynamic ones differ only beyond the trained length
                return inverse
            case RopeType.LINEAR:
                return inverse / config.factor
            case RopeType.LLAMA3:
                return _llama3(config, inverse)
            case RopeType.YARN:
                return self._yarn()

    def _dynamic_inverse_frequencies(self, lengths: Tensor) -> Tensor:
        """NTK scaling for sequences of ``lengths``; (n, head_dim / 2)."""
        factor, trained = self._config.factor, self._config.original_max_position_embeddings
        stretch = (factor * lengths.clamp(min=trained).to(self._exact) / trained) - (factor - 1)
        bases = self._config.theta * stretch ** (self._head_dim / (self._head_dim - 2))
        return 1.0 / (bases[:, None] ** self._exponents)

    def _yarn(self) -> Tensor:
        config, dim = self._config, self._head_dim
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


def _yarn_attention_factor(config: RopeConfig) -> float:
    if config.attention_factor is not None:
        return config.attention_factor

    def scale(mscale: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * mscale * math.log(config.factor) + 1.0

    if config.mscale and config.mscale_all_dim:
        return scale(config.mscale) / scale(config.mscale_all_dim)
    return scale(1.0)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads ``x`` (n, heads, head_dim) by tables (n, head_dim / 2); the halves of a head form the pairs."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
