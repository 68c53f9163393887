"""What a step takes on an instance of several ranks, from arithmetic, bytes and messages alone.

Ranks are tensor-parallel by ``tensor``, in ``stages`` of layers, and a context's KV may be spread over ``kv_members``
such instances (Mnemosyne §4.3, §4.4). A layer takes as long as the slower of its arithmetic and its bytes, then its
collectives; nothing is fitted but the two ``software_s`` of `Roofline`, which are 0 unless a study gives them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from pdmesh.policy.latency import ChunkShape, ModelShape, StepShape


class DeviceLink(NamedTuple):
    """How a device reaches others: one way, and by how much each step of a collective is late."""

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """A device with its peaks, what of them kernels reach, and how it reaches devices of its host and of others."""

    flops_per_s: float
    bytes_per_s: float
    memory_bytes: float
    matmul_utilisation: float
    attention_utilisation: float
    bytes_utilisation: float
    kernel_s: float  # the least a kernel takes in a captured graph
    collective_s: float  # of any collective, before its first step
    local: DeviceLink
    remote: DeviceLink


#: Peaks, memory and NVLink (one way) are the data sheets'; InfiniBand is Mnemosyne's (§6.1), and AWS's 400 Gb/s of a
#: p4de host, divided among its eight (PecSched §6.2). FlashAttention-2 reaches 35 % of an H100 (FlashAttention-3,
#: abstract) and 50 to 73 % of an A100 (FlashAttention-2, abstract): the middle. NCCL gets 370 of NVLink's 450 GB/s
#: (nccl-tests issue 212), and its own tuning tables have the latencies: 6.6 us for a ring, 0.6 and 2.7 us a step over
#: NVLink and network. Assumed are 70 % of the peak in products, 90 % of memory's, and 3 us for the least kernel.
H100 = Accelerator(
    flops_per_s=989e12,
    bytes_per_s=3.35e12,
    memory_bytes=80e9,
    matmul_utilisation=0.7,
    attention_utilisation=0.35,
    bytes_utilisation=0.9,
    kernel_s=3e-6,
    collective_s=6.6e-6,
    local=DeviceLink(370e9, 0.6e-6),
    remote=DeviceLink(50e9, 2.7e-6),
)
A100 = Accelerator(
    flops_per_s=312e12,
    bytes_per_s=2.04e12,
    memory_bytes=80e9,
    matmul_utilisation=0.7,
    attention_utilisation=0.615,
    bytes_utilisation=0.9,
    kernel_s=3e-6,
    collective_s=6.6e-6,
    local=DeviceLink(300e9 * 370 / 450, 0.6e-6),
    remote=DeviceLink(6.25e9, 2.7e-6),
)

#: Norms, projections, rotation, KV write, attention and its merge, activation: of one layer, without collectives.
_KERNELS_OF_LAYER = 10

#: Of the device's memory, what weights and KV may take (vLLM's default).
_MEMORY_SHARE = 0.9


class Degrees(NamedTuple):
    """How many ranks an instance has of each kind, and over how many such instances a context is spread."""

    tensor: int
    stages: int = 1
    kv_members: int = 1

    @property
    def num_devices(self) -> int:
        """Devices of all members."""
        return self.tensor * self.stages * self.kv_members


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """A latency model of one model on one layout. Layers are divided evenly, and so is a context over members."""

    model: ModelShape
    device: Accelerator
    degrees: Degrees
    handoff_software_s: float = 0.0  # from stage to stage, beside the bytes
    exchange_software_s: float = 0.0  # of members in a layer, beside the bytes

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of one token's KV in all layers."""
        model = self.model
        return 2 * model.num_layers * model.num_kv_heads * model.head_dim * model.dtype_bytes

    @property
    def num_kv_tokens(self) -> int:
        """Tokens of one context that the memory of all members has room for, beside each one's weights."""
        degrees = self.degrees
        num_ranks = degrees.tensor * degrees.stages
        room = num_ranks * self.device.memory_bytes * _MEMORY_SHARE
        room -= self.model.num_parameters * self.model.dtype_bytes
        return max(0, int(room / self.kv_token_bytes)) * degrees.kv_members

    def step_s(self, shape: StepShape) -> float:
        """Return how long a step takes through all stages, one after the other."""
        num_stages = self.degrees.stages
        return num_stages * self.stage_s(shape) + (num_stages - 1) * self.handoff_s(_num_rows(shape))

    def stage_s(self, shape: StepShape) -> float:
        """Return how long a step keeps one stage."""
        return self.model.num_layers / self.degrees.stages * self._layer_s(shape)

    def handoff_s(self, num_rows: float) -> float:
        """Return how long hidden states take from one stage to the next, which is on another host."""
        link = self.device.remote
        num_bytes = num_rows * self._hidden * self.model.dtype_bytes / self.degrees.tensor
        return self.handoff_software_s + link.latency_s + num_bytes / link.bytes_per_s

    def prefill_s(self, num_tokens: int, chunk_tokens: int) -> float:
        """Return when the last of a prompt's chunks leaves the last stage, each entering a stage behind the other."""
        chunks = [
            StepShape((ChunkShape(min(chunk_tokens, num_tokens - start), start),), 0, 0)
            for start in range(0, num_tokens, chunk_tokens)
        ]
        handoff_s = self.handoff_s(min(chunk_tokens, num_tokens))
        return pipelined_s([self.stage_s(chunk) for chunk in chunks], self.degrees.stages, handoff_s)

    @property
    def _hidden(self) -> int:
        return self.model.num_heads * self.model.head_dim

    def _layer_s(self, shape: StepShape) -> float:
        model, degrees = self.model, self.degrees
        num_rows = _num_rows(shape)
        layer_s = self._linear_s(num_rows) + self.attention_s(shape) + _KERNELS_OF_LAYER * self.device.kernel_s
        if degrees.tensor > 1:
            reduced = num_rows * self._hidden * model.dtype_bytes
            layer_s += 2 * all_reduce_s(reduced, degrees.tensor, self.device.local, self.device.collective_s)
        if degrees.kv_members > 1:
            # Each head's output and its log-sum-exp, in fp32.
            partial = num_rows * model.num_heads / degrees.tensor * (model.head_dim + 1) * 4
            gathered_s = all_gather_s(partial, degrees.kv_members, self.device.remote, self.device.collective_s)
            layer_s += gathered_s + self.exchange_software_s
        return layer_s

    def _linear_s(self, num_rows: float) -> float:
        model, device, tensor = self.model, self.device, self.degrees.tensor
        of_layer = model.num_parameters / model.num_layers / tensor
        computed_s = 2 * of_layer * num_rows / (device.flops_per_s * device.matmul_utilisation)
        return max(computed_s, of_layer * model.dtype_bytes / (device.bytes_per_s * device.bytes_utilisation))

    def attention_s(self, shape: StepShape) -> float:
        """Return how long one layer's attention takes: of chunks, and of decodes beside them."""
        model, device, degrees = self.model, self.device, self.degrees
        pairs = shape.num_decode_context_tokens
        read = shape.num_decode_context_tokens
        for chunk in shape.chunks:
            pairs += chunk.num_tokens * (chunk.num_history_tokens + chunk.num_tokens / 2)
            read += chunk.num_history_tokens + chunk.num_tokens
        flops = 4 * pairs * model.num_heads / degrees.tensor * model.head_dim
        # Where there are fewer KV heads than ranks, several read the same one.
        kv_bytes = read * self.kv_token_bytes / model.num_layers / min(degrees.tensor, model.num_kv_heads)
        computed_s = flops / (device.flops_per_s * device.attention_utilisation)
        return max(computed_s, kv_bytes / (device.bytes_per_s * device.bytes_utilisation)) / degrees.kv_members


def all_reduce_s(num_bytes: float, num_ranks: int, link: DeviceLink, collective_s: float) -> float:
    """Return how long a ring takes to add up ``num_bytes`` of each rank."""
    steps = 2 * (num_ranks - 1)
    return collective_s + steps * (link.latency_s + num_bytes / num_ranks / link.bytes_per_s)


def all_gather_s(num_bytes: float, num_ranks: int, link: DeviceLink, collective_s: float) -> float:
    """Return how long a ring takes until each rank has the ``num_bytes`` of every other."""
    return collective_s + (num_ranks - 1) * (link.latency_s + num_bytes / link.bytes_per_s)


def pipelined_s(stages_s: Iterable[float], num_stages: int, handoff_s: float) -> float:
    """Return when the last of several steps leaves the last of equal stages; ``stages_s`` are what each keeps one."""
    left_s = [0.0] * num_stages  # when each stage was left by the step before
    for stage_s in stages_s:
        ready_s = 0.0
        for stage in range(num_stages):
            ready_s = left_s[stage] = max(ready_s, left_s[stage]) + stage_s
            ready_s += handoff_s
    return left_s[-1]


def _num_rows(shape: StepShape) -> float:
    return shape.num_tokens + shape.num_decodes
