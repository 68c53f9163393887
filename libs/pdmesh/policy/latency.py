"""Prediction of a step's duration from its chunks and decodes.

The model is Eq. 1 of Tetris (§5.1), summed over a step's chunks, with terms for the decodes beside them and for reading
the weights. A profile is such a model for one LLM on one instance. ``PROFILES`` has the built-in ones, and
`pdmesh.policy.fit` makes others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol, Self


class ChunkShape(NamedTuple):
    """Number of new prompt tokens of one request, and of the tokens before them."""

    num_tokens: int
    num_history_tokens: int


class StepShape(NamedTuple):
    """Contents of a step, or of the mean of several steps: chunks, and one token for each decode.

    ``num_decode_context_tokens`` is the sum over the decodes.
    """

    chunks: tuple[ChunkShape, ...]
    num_decodes: float
    num_decode_context_tokens: float

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all chunks."""
        return sum([chunk.num_tokens for chunk in self.chunks])

    def shared_by(self, num_steps: int) -> StepShape:
        """Return the step with its share of the decodes if these are dealt out to ``num_steps``, at least one each."""
        num_shares = min(num_steps, self.num_decodes)
        if num_shares <= 1:
            return self
        return StepShape(self.chunks, self.num_decodes / num_shares, self.num_decode_context_tokens / num_shares)


class LatencyModel(Protocol):
    """Predictor of a step's device time."""

    def step_s(self, shape: StepShape) -> float: ...


#: Value of `LinearLatencyModel.mixed_a_s` that stands for ``a_s``.
_AS_CHUNKS = -1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearLatencyModel:
    """a + max(weights, b·ΣL + decode·D) + c·Σ(C·L) + d·ΣL² + context·K + interference·ΣL·D/(ΣL + D), seconds.

    L is the number of a chunk's new tokens, C the number of tokens before them, and D decodes have K tokens of context
    together. The constant is ``a_s`` for chunks alone, ``decode_a_s`` for decodes alone, and ``mixed_a_s`` (by default
    ``a_s``) for both. The linear layers read all weights, in ``weights_s``, and compute at the same time. A model of
    ``weights_s`` 0 is a sum: its constants include the reading. Interference, in seconds per token, is the time of a
    mixed step beyond its parts: the quadratic of EB+ in the decode share (appendix A.3), written for one step. An empty
    step takes no time.
    """

    a_s: float
    b_s: float
    c_s: float
    d_s: float
    decode_a_s: float = 0.0
    decode_s: float = 0.0
    decode_context_s: float = 0.0
    mixed_a_s: float = _AS_CHUNKS
    interference_s: float = 0.0
    weights_s: float = 0.0

    def __post_init__(self) -> None:
        if self.mixed_a_s == _AS_CHUNKS:
            object.__setattr__(self, "mixed_a_s", self.a_s)

    @property
    def coefficients(self) -> tuple[float, ...]:
        """The coefficients in the order of the fields, and of `features`."""
        return (
            self.a_s,
            self.b_s,
            self.c_s,
            self.d_s,
            self.decode_a_s,
            self.decode_s,
            self.decode_context_s,
            self.mixed_a_s,
            self.interference_s,
            self.weights_s,
        )

    @classmethod
    def of(cls, coefficients: Iterable[float]) -> Self:
        """Build the model from its `coefficients`."""
        a_s, b_s, c_s, d_s, decode_a_s, decode_s, decode_context_s, mixed_a_s, interference_s, weights_s = coefficients
        return cls(
            a_s=a_s,
            b_s=b_s,
            c_s=c_s,
            d_s=d_s,
            decode_a_s=decode_a_s,
            decode_s=decode_s,
            decode_context_s=decode_context_s,
            mixed_a_s=mixed_a_s,
            interference_s=interference_s,
            weights_s=weights_s,
        )

    def step_s(self, shape: StepShape) -> float:
        if not shape.chunks:
            if not shape.num_decodes:
                return 0.0
            total_s = self.decode_s * shape.num_decodes + self.decode_context_s * shape.num_decode_context_tokens
            total_s += self.decode_a_s
        else:
            total_s = self._apart_s(shape)
            if self.interference_s and shape.num_decodes:
                total_s += self.interference_s * _mixing(shape.num_tokens, shape.num_decodes)
        if self.weights_s:
            total_s += self.idle_s(shape.num_tokens, shape.num_decodes)
        return total_s

    def idle_s(self, num_tokens: int, num_decodes: float) -> float:
        """Return how much longer a step reads the weights than it computes linear layers; 0 where it does not."""
        spare_s = self.weights_s - (self.b_s * num_tokens + self.decode_s * num_decodes)
        return spare_s if spare_s > 0 else 0.0

    def _apart_s(self, shape: StepShape) -> float:
        """Return the time, without interference and `idle_s`, of a step that has chunks or will get one."""
        total_s = self.decode_s * shape.num_decodes + self.decode_context_s * shape.num_decode_context_tokens
        total_s += self.mixed_a_s if shape.num_decodes else self.a_s
        for chunk in shape.chunks:
            num_tokens = chunk.num_tokens
            total_s += num_tokens * (self.b_s + self.c_s * chunk.num_history_tokens + self.d_s * num_tokens)
        return total_s

    def with_chunk_s(self, beside: StepShape, num_history_tokens: int) -> Callable[[int], float]:
        """Return a function from a chunk's tokens to `step_s` of the step ``beside`` with that chunk.

        The function and `step_s` agree bit for bit.
        """
        before_s = self._apart_s(beside)
        token_s, d_s = self.b_s + self.c_s * num_history_tokens, self.d_s
        mixing_s, num_before, num_decodes = self.interference_s, beside.num_tokens, beside.num_decodes
        if mixing_s and num_decodes:
            return lambda num_tokens: (
                before_s
                + num_tokens * (token_s + d_s * num_tokens)
                + mixing_s * _mixing(num_before + num_tokens, num_decodes)
                + self.idle_s(num_before + num_tokens, num_decodes)
            )
        if self.weights_s:
            return lambda num_tokens: (
                before_s + num_tokens * (token_s + d_s * num_tokens) + self.idle_s(num_before + num_tokens, num_decodes)
            )
        return lambda num_tokens: before_s + num_tokens * (token_s + d_s * num_tokens)


def _mixing(num_tokens: int, num_decodes: float) -> float:
    """Return L·D/(L + D): 0 for a step of one kind, and largest for equal parts. Not defined for an empty step."""
    return num_tokens * num_decodes / (num_tokens + num_decodes)


def features(shape: StepShape, *, reads_longer: bool = False) -> tuple[float, ...]:
    """Return the factors of `LinearLatencyModel.coefficients` in a step's time, in the same order.

    ``reads_longer``: whether the step reads the weights for longer than it computes linear layers.
    """
    is_mixed = bool(shape.chunks) and shape.num_decodes > 0
    tokens = history = squares = 0
    for chunk in shape.chunks:
        tokens += chunk.num_tokens
        history += chunk.num_tokens * chunk.num_history_tokens
        squares += chunk.num_tokens**2
    return (
        bool(shape.chunks) and not is_mixed,
        0 if reads_longer else tokens,
        history,
        squares,
        not shape.chunks and shape.num_decodes > 0,
        0 if reads_longer else shape.num_decodes,
        shape.num_decode_context_tokens,
        is_mixed,
        _mixing(tokens, shape.num_decodes) if is_mixed else 0.0,
        reads_longer,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a dense decoder. ``num_parameters`` leaves out the input embedding."""

    num_parameters: float
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Peak rates of one instance's hardware, and the share of the peaks that serving reaches.

    Medha and Mnemosyne measure 50-75 % MFU in chunked prefill, and Mnemosyne up to 92 % MBU. ``launch_s`` is the time
    of a step before the device begins.
    """

    flops_per_s: float
    bytes_per_s: float
    flops_utilisation: float = 0.55
    bytes_utilisation: float = 0.8
    launch_s: float = 1e-3


def analytic_model(model: ModelShape, device: Device, *, overlaps: bool = False) -> LinearLatencyModel:
    """Return a latency model from arithmetic and bytes alone.

    A token costs 2 FLOPs per parameter. Attention costs 4 FLOPs per head dimension, head, layer and (query, key) pair.
    A causal chunk of L tokens has L²/2 such pairs, and C·L with its history. Each step reads all weights, and the KV of
    every context that decodes. With ``overlaps``, a step reads the weights while it computes. Otherwise the model is a
    sum, in which a decode step reads them first and chunks are taken as bound by arithmetic, as in the studies.
    """
    flop_s = 1 / (device.flops_per_s * device.flops_utilisation)
    byte_s = 1 / (device.bytes_per_s * device.bytes_utilisation)
    pair_s = 4 * model.num_layers * model.num_heads * model.head_dim * flop_s
    weights_s = model.num_parameters * model.dtype_bytes * byte_s
    kv_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * model.dtype_bytes
    return LinearLatencyModel(
        a_s=device.launch_s,
        b_s=2 * model.num_parameters * flop_s,
        c_s=pair_s,
        d_s=pair_s / 2,
        decode_a_s=device.launch_s + (0.0 if overlaps else weights_s),
        decode_s=2 * model.num_parameters * flop_s,
        decode_context_s=kv_bytes * byte_s,
        weights_s=weights_s if overlaps else 0.0,
    )


LLAMA_3_8B = ModelShape(num_parameters=7.5e9, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128)
LLAMA_3_70B = ModelShape(num_parameters=69.5e9, num_layers=80, num_heads=64, num_kv_heads=8, head_dim=128)

#: Vendor data sheets: dense bf16 peak and memory bandwidth of the SXM parts.
A100 = Device(flops_per_s=312e12, bytes_per_s=2.04e12)
H100 = Device(flops_per_s=989e12, bytes_per_s=3.35e12)
H200 = Device(flops_per_s=989e12, bytes_per_s=4.8e12)


def tensor_parallel(device: Device, degree: int) -> Device:
    """Return ``degree`` devices as one; communication takes 15 % of the compute rate of more than one."""
    return Device(
        flops_per_s=device.flops_per_s * degree,
        bytes_per_s=device.bytes_per_s * degree,
        flops_utilisation=device.flops_utilisation * (0.85 if degree > 1 else 1.0),
        bytes_utilisation=device.bytes_utilisation,
        launch_s=device.launch_s,
    )


def _measured(a_s: float, b_s: float, c_s: float, d_s: float) -> LinearLatencyModel:
    decodes = analytic_model(LLAMA_3_8B, A100)
    return LinearLatencyModel(
        a_s=a_s,
        b_s=b_s,
        c_s=c_s,
        d_s=d_s,
        decode_a_s=decodes.decode_a_s,
        decode_s=decodes.decode_s,
        decode_context_s=decodes.decode_context_s,
    )


#: Llama-3-8B on A100s by sequence-parallel size: prefill fitted (`pdmesh.policy.fit`) to Tetris, Table 1, where "4k" is
#: 4096 tokens, within 7 % in every cell and within 1 % at size 1. The table has no history; decode terms are analytic.
TETRIS_A100_LLAMA_3_8B: Mapping[int, LinearLatencyModel] = MappingProxyType(
    {
        1: _measured(3.00837e-2, 5.57850e-5, 2.52985e-9, 1.26493e-9),
        2: _measured(2.57618e-2, 3.01445e-5, 1.21701e-9, 6.08503e-10),
        4: _measured(5.85231e-2, 1.55472e-5, 6.10400e-10, 3.05200e-10),
        8: _measured(1.73724e-1, 6.73878e-6, 3.28733e-10, 1.64367e-10),
        16: _measured(3.86661e-1, 2.46569e-6, 1.78878e-10, 8.94392e-11),
    }
)

#: Built-in profiles. "a100-llama3-8b" is measured (see above), the others are analytic; "x4" is tensor-parallel.
PROFILES: Mapping[str, LinearLatencyModel] = MappingProxyType(
    {
        "a100-llama3-8b": TETRIS_A100_LLAMA_3_8B[1],
        "a100-llama3-8b-analytic": analytic_model(LLAMA_3_8B, A100, overlaps=True),
        "h100-llama3-8b": analytic_model(LLAMA_3_8B, H100, overlaps=True),
        "h200-llama3-8b": analytic_model(LLAMA_3_8B, H200, overlaps=True),
        "a100x4-llama3-70b": analytic_model(LLAMA_3_70B, tensor_parallel(A100, 4), overlaps=True),
        "h100x4-llama3-70b": analytic_model(LLAMA_3_70B, tensor_parallel(H100, 4), overlaps=True),
        "h200x4-llama3-70b": analytic_model(LLAMA_3_70B, tensor_parallel(H200, 4), overlaps=True),
    }
)
