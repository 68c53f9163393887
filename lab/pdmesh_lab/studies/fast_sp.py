"""PecSched's fast sequence parallelism (§5.3): what one layer of a long prompt takes, by how its tokens are divided.

Replicas of ``tensor`` GPUs compute a prompt together. *Ring* alone passes KV between all of them (§2.2). *Fast* has a
ring between nodes, and inside a node divides heads: with each rank's part of the weights, gathering tokens (Megatron),
or with whole weights, which travel (Ulysses); of each stage, attention and MLP, whichever takes less. Segments of a
ring are contiguous, so the last one attends to all others and the ring waits for it: with ``r`` members attention takes
``2 - 1/r`` times as long as if it were even. The paper's formulas count no causal mask; here half of the pairs are.
"""

from __future__ import annotations

from typing import NamedTuple

from pdmesh.policy.latency import ModelShape
from pdmesh_lab.studies.roofline import Accelerator


class LongPrompt(NamedTuple):
    """A prompt of a model, on so many nodes of eight GPUs, of which replicas take ``tensor`` each."""

    model: ModelShape
    num_tokens: int
    tensor: int
    num_gpus: int


GPUS_OF_NODE = 8


def ring_lag(num_members: int) -> float:
    """Return how many times longer attention takes than if each of a ring's contiguous segments had the same."""
    return 2 - 1 / num_members


def ring_s(prompt: LongPrompt, device: Accelerator) -> float:
    """Return what a layer takes where all replicas are one ring."""
    num_members = prompt.num_gpus // prompt.tensor
    return (
        _linear_s(prompt, device)
        + _attention_s(prompt, device, num_members)
        + (2 * _gathered_s(prompt, device, prompt.tensor) if prompt.tensor > 1 else 0.0)
    )


def fast_s(prompt: LongPrompt, device: Accelerator) -> tuple[float, str]:
    """Return what a layer takes by fast sequence parallelism, and by which of the four combinations."""
    attention = {"Megatron": _megatron_s(prompt, device), "Ulysses": _ulysses_s(prompt, device)}
    mlp = {"Megatron": _gathered_s(prompt, device, prompt.tensor), "Ulysses": _mlp_weights_s(prompt, device)}
    if prompt.tensor == 1:
        del attention["Megatron"], mlp["Megatron"]
    by_attention, by_mlp = min(attention, key=attention.__getitem__), min(mlp, key=mlp.__getitem__)
    seconds = _linear_s(prompt, device) + attention[by_attention] + mlp[by_mlp]
    return seconds, f"{by_attention}, {by_mlp}"


def _linear_s(prompt: LongPrompt, device: Accelerator) -> float:
    model = prompt.model
    flops = 2 * model.num_parameters / model.num_layers * prompt.num_tokens / prompt.num_gpus
    return flops / (device.flops_per_s * device.matmul_utilisation)


def _attention_s(prompt: LongPrompt, device: Accelerator, num_members: int) -> float:
    """Attention in a ring of so many, each with its share of the GPUs; its KV travels meanwhile."""
    model, num_tokens = prompt.model, prompt.num_tokens
    flops = 4 * num_tokens * num_tokens / 2 * model.num_heads * model.head_dim / prompt.num_gpus
    computed_s = flops / (device.flops_per_s * device.attention_utilisation) * ring_lag(num_members)
    segment_bytes = 2 * num_tokens / num_members * model.num_kv_heads * model.head_dim * model.dtype_bytes
    # A segment leaves a node over all of its adapters.
    is_on_one_node = prompt.num_gpus <= GPUS_OF_NODE
    rate = device.local.bytes_per_s if is_on_one_node else device.remote.bytes_per_s * GPUS_OF_NODE
    return max(computed_s, (num_members - 1) * segment_bytes / rate)


def _num_nodes(prompt: LongPrompt) -> int:
    return max(1, prompt.num_gpus // GPUS_OF_NODE)


def _megatron_s(prompt: LongPrompt, device: Accelerator) -> float:
    # Tensor-parallel regions of a node stay members of the ring.
    num_members = prompt.num_gpus // prompt.tensor
    return _attention_s(prompt, device, num_members) + _gathered_s(prompt, device, prompt.tensor)


def _ulysses_s(prompt: LongPrompt, device: Accelerator) -> float:
    model = prompt.model
    num_gpus = min(prompt.num_gpus, GPUS_OF_NODE)
    of_gpu = prompt.num_tokens / prompt.num_gpus
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    exchanged = 2 * of_gpu * heads * model.dtype_bytes * (num_gpus - 1) / num_gpus
    hidden = model.num_heads * model.head_dim
    weights = hidden * (heads + hidden) * model.dtype_bytes * (prompt.tensor - 1) / prompt.tensor
    return _attention_s(prompt, device, _num_nodes(prompt)) + (exchanged + weights) / device.local.bytes_per_s


def _mlp_weights_s(prompt: LongPrompt, device: Accelerator) -> float:
    model = prompt.model
    hidden = model.num_heads * model.head_dim
    of_layer = model.num_parameters / model.num_layers - hidden * (2 * hidden + 2 * model.num_kv_heads * model.head_dim)
    num_bytes = of_layer * model.dtype_bytes * (prompt.tensor - 1) / prompt.tensor
    return num_bytes / device.local.bytes_per_s


def _gathered_s(prompt: LongPrompt, device: Accelerator, tensor: int) -> float:
    """All-gather of a stage's inputs and reduce-scatter of its outputs, among the ranks of a replica."""
    hidden_bytes = prompt.model.num_heads * prompt.model.head_dim * prompt.model.dtype_bytes
    return 2 * prompt.num_tokens / prompt.num_gpus * (tensor - 1) * hidden_bytes / device.local.bytes_per_s
