"""Merging of a LoRA adapter (PEFT's ``adapter_config.json`` and safetensors) into weights as they are read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pdmesh.engine.config_fields import Fields
from pdmesh.engine.grouped import GroupedWeight
from pdmesh.engine.json_files import read_json_object
from pdmesh.engine.model_config import ModelConfig
from pdmesh.engine.quantized import FLOATS, Shape, Stored
from pdmesh.engine.stored import FileTensors
from pdmesh.engine.tensors import Tensors, some
from pdmesh.errors import ConfigError
from pdmesh.kv_layout import IndexRange

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
#: Fields whose features are not served. Empty values are accepted.
_UNSERVED = (
    "use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "layer_replication", "megatron_config",
    "trainable_token_indices", "target_parameters", "alora_invocation_tokens", "use_qalora", "lora_bias",
)  # fmt: skip
_MAX_RANK = 4096


@dataclass(frozen=True, slots=True)
class Adapter:
    """The content of ``adapter_config.json``. ``scale`` multiplies the product of an adapter's two matrices."""

    directory: Path
    rank: int
    scale: float


def read_adapter(directory: Path) -> Adapter:
    """Read ``adapter_config.json``. Raise ConfigError for an adapter that cannot be merged."""
    path = directory / _CONFIG
    fields = Fields(read_json_object(path), str(path))
    if (kind := fields.raw.get("peft_type")) != "LORA":
        raise fields.error(f"the adapter is of type {kind!r}; only LORA is supported")
    if unserved := [name for name in _UNSERVED if fields.raw.get(name)]:
        raise fields.error(
            f"{unserved[0]} is set, which is not supported; merge the adapter with `peft` and serve the result"
        )
    if fields.raw.get("bias", "none") != "none" or fields.boolean("fan_in_fan_out"):
        raise fields.error(
            "biases or transposed weights are adapted, which is not supported; merge the adapter with `peft`"
        )
    rank = fields.integer("r")
    if rank > _MAX_RANK:
        raise fields.error(f"r is {rank}; ranks up to {_MAX_RANK} are supported")
    divisor = math.sqrt(rank) if fields.boolean("use_rslora") else rank
    return Adapter(directory, rank, fields.number("lora_alpha", default=8.0) / divisor)


@contextmanager
def adapted(tensors: Tensors, directory: Path, config: ModelConfig, dtype: torch.dtype) -> Iterator[AdaptedTensors]:
    """Yield ``tensors`` with a directory's adapter merged, in ``dtype``. Raise ConfigError."""
    adapter = read_adapter(directory)
    if config.transposes_weights or config.names.fuses_experts:
        raise ConfigError(
            f"{adapter.directory}: adapters of a {config.architecture} are not supported; merge the adapter with `peft`"
        )
    path = adapter.directory / _WEIGHTS
    try:
        opened = safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; an adapter's weights are safetensors") from error
    with opened as file:
        parts: dict[str, dict[str, str]] = {}
        for name in file.keys():  # noqa: SIM118
            if (found := _NAME.fullmatch(name)) is None:
                raise ConfigError(
                    f"{path}: tensor {name!r} is not a LoRA matrix of a linear layer; other adapters are not supported"
                )
            parts.setdefault(found[1], {})[found[2]] = name
        adapted_names = {f"{layer}.weight": ends for layer, ends in parts.items()}
        for name, ends in adapted_names.items():
            if ends.keys() != {"A", "B"}:
                raise ConfigError(f"{path}: {name!r} has only one of its two matrices; download the adapter again")
        stored = FileTensors(adapter.directory, {name: (file, name) for name in file.keys()})  # noqa: SIM118
        yield AdaptedTensors(tensors, stored, adapter, adapted_names, dtype)


@dataclass(frozen=True, slots=True)
class AdaptedTensors:
    """`pdmesh.engine.tensors.Tensors` of weights plus their adapters, computed in fp32 and rounded once."""

    base: Tensors
    stored: FileTensors
    adapter: Adapter
    names: dict[str, dict[str, str]]
    dtype: torch.dtype

    def __contains__(self, name: str) -> bool:
        return name in self.base

    def check(self, name: str, shape: Shape) -> Sequence[str]:
        names = self.base.check(name, shape)
        if (own := self.names.get(name)) is None:
            return names
        outputs, inputs = shape
        self.stored.check_stored(own["A"], Stored(((self.adapter.rank, inputs),), FLOATS))
        self.stored.check_stored(own["B"], Stored(((outputs, self.adapter.rank),), FLOATS))
        return (*names, *own.values())

    def read(self, name: str, shape: Shape, rows: IndexRange | None = None) -> Tensor:
        if (own := self.names.get(name)) is None:
            return self.base.read(name, shape, rows)
        self.check(name, shape)
        into, out = (self.stored.read_stored(own[end]).float() for end in "AB")
        # All rows are computed, whichever are wanted: a product of fewer rows may be summed otherwise.
        weight = self.base.read(name, shape).float().addmm(out, into, alpha=self.adapter.scale)
        return some(weight, rows).to(self.dtype)

    def grouped(self, name: str, shape: Shape, rows: IndexRange | None = None) -> GroupedWeight | None:
        return None if name in self.names else self.base.grouped(name, shape, rows)

    def check_all_used(self, used: Set[str]) -> None:
        if foreign := sorted(name for name, own in self.names.items() if used.isdisjoint(own.values())):
            raise ConfigError(
                f"{self.adapter.directory}: the adapter is for {foreign[0]!r}, which the model does not have; give the "
                "model that it was trained on"
            )
        self.base.check_all_used(used)
