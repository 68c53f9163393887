"""Profiles: how fast one model is on one kind of instance, and whether an instance is of that kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from pdmesh.errors import ConfigError
from pdmesh.model import InstanceProfile, MeasuredStep
from pdmesh.policy.latency import (
    LLAMA_3_8B,
    LLAMA_3_70B,
    PROFILES,
    ChunkShape,
    Device,
    LinearLatencyModel,
    ModelShape,
    StepShape,
    analytic_model,
)
from pdmesh.policy.refine import Refinement


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model and the hardware that computes it. Zero parameters and empty names mean unknown.

    ``device``: cpu, cuda, cuda:1.
    ``device_name``: name that the hardware reports; in a profile, a part of it.
    ``num_ranks``: number of processes that compute together, divided into ``num_stages``.
    """

    model: str
    num_parameters: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    device: str
    device_name: str
    num_ranks: int = 1
    num_stages: int = 1

    @classmethod
    def of(cls, instance: InstanceProfile) -> Self:
        layout = instance.kv_layout
        return cls(
            model=instance.model,
            num_parameters=instance.num_parameters,
            num_layers=layout.num_layers,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            dtype=layout.dtype,
            device=instance.device,
            device_name=instance.device_name,
            num_ranks=max(1, len(instance.rank_pids)),
            num_stages=instance.num_stages,
        )

    @property
    def device_class(self) -> str:
        """Key that is equal for equally fast instances: everything but the model's name and the device's number."""
        device = self.device.partition(":")[0]
        sizes = f"{self.num_parameters} {self.num_layers} {self.num_kv_heads} {self.head_dim} {self.dtype}"
        ranks = "" if self.num_ranks == self.num_stages == 1 else f" {self.num_ranks} ranks {self.num_stages} stages"
        return f"{sizes} {device} {self.device_name}{ranks}"

    def __str__(self) -> str:
        size = f"{self.num_parameters / 1e6:.4g}M parameters" if self.num_parameters else f"{self.num_layers} layers"
        hardware = f"{self.device} ({self.device_name})" if self.device_name else self.device
        return f"{self.model} ({size}{', ' if self.dtype else ''}{self.dtype}) on {hardware}"


def device_class_of(instance: InstanceProfile) -> str:
    """Return the key of an instance's speed: the model's sizes and dtype, the hardware, ranks and stages."""
    return Subject.of(instance).device_class


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A latency model and its subject. ``name`` is a built-in profile or the path of a file."""

    name: str
    subject: Subject
    latency: LinearLatencyModel

    def mismatch(self, other: Subject) -> str | None:
        """Return in one sentence why this profile does not apply to ``other``; None if it does.

        The model's name does not matter, because instances of one device class are equally fast.
        """
        own = self.subject
        same = (
            (own.num_layers, own.num_kv_heads, own.head_dim) == (other.num_layers, other.num_kv_heads, other.head_dim)
            and _agree(own.num_parameters, other.num_parameters)
            and _agree(own.dtype, other.dtype)
            and own.device.partition(":")[0] == other.device.partition(":")[0]
            and (not other.device_name or own.device_name in other.device_name)
        )
        if same:
            return None
        return (
            f"the latency profile {self.name!r} was measured for {own}, not for {other}: measure one with "
            "`pdmesh profile`"
        )


def _agree(one: object, other: object) -> bool:
    """Whether both are equal, or one is unknown."""
    return one == other or not (one and other)


def built_in_profile(name: str) -> Profile:
    """Return the built-in profile called ``name``, for an Nvidia device. Raises ConfigError if there is none."""
    latency = PROFILES.get(name)
    if latency is None:
        raise ConfigError(
            f"no latency profile and no file is called {name!r}: use one of {', '.join(sorted(PROFILES))}, or a file "
            "that `pdmesh profile` wrote"
        )
    hardware, _, model = name.partition("-")
    shape = LLAMA_3_70B if "70b" in model else LLAMA_3_8B
    subject = Subject(
        model=model,
        num_parameters=0,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype="",
        device="cuda",
        device_name=hardware.partition("x")[0].upper(),
    )
    return Profile(name=name, subject=subject, latency=latency)


#: Assumed FLOPs for each byte that memory delivers: CPUs have about 40, GPUs 150 to 300.
_FLOPS_PER_BYTE = 80.0

#: Passes over the same steps, since each pass weighs them by the last one's predictions. Rounds of passes, since each
#: round takes from the last one which steps read the weights for longer than they compute.
_PASSES, _ROUNDS = 5, 3


def shape_of(step: MeasuredStep) -> StepShape:
    """Return the shape of a measured step: at most one chunk, and the decodes beside it."""
    chunks = (ChunkShape(step.num_tokens, step.num_history_tokens),) if step.num_tokens else ()
    return StepShape(chunks, step.num_decodes, step.num_decode_context_tokens)


def self_measured(instance: InstanceProfile) -> LinearLatencyModel | None:
    """Return a latency model from the steps that an instance timed when it started.

    The model's arithmetic stands in for what these steps leave open. None without a step of prompt tokens or without
    the number of parameters.
    """
    steps = [(shape_of(step), step.duration_s) for step in instance.measured_steps]
    largest = max(instance.measured_steps, key=lambda step: step.num_tokens, default=None)
    if largest is None or not largest.num_tokens or not instance.num_parameters:
        return None
    layout = instance.kv_layout
    shape = ModelShape(
        num_parameters=instance.num_parameters,
        num_layers=layout.num_layers,
        num_heads=max(instance.num_heads, layout.num_kv_heads),
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
    )
    flops_per_s = 2 * instance.num_parameters * largest.num_tokens / largest.duration_s
    device = Device(
        flops_per_s=flops_per_s,
        bytes_per_s=flops_per_s / _FLOPS_PER_BYTE,
        flops_utilisation=1.0,
        bytes_utilisation=1.0,
        launch_s=min(step.duration_s for step in instance.measured_steps) / 2,
    )
    prior = model = analytic_model(shape, device, overlaps=True)
    for _ in range(_ROUNDS):
        learnt = Refinement(prior, model)
        for _ in range(_PASSES):
            for step, seconds in steps:
                learnt.observe(step, seconds)
            learnt.look()
        model = learnt.estimate
    return model
