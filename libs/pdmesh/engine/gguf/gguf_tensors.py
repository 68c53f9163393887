"""Weights of a GGUF file, dequantised when they are read."""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pdmesh.engine.gguf.gguf_architectures import ARCHITECTURES
from pdmesh.engine.gguf.gguf_blocks import GROUPED, values_of
from pdmesh.engine.gguf.gguf_model import GgufModel
from pdmesh.engine.gguf.gguf_names import LAYER_NAMES, NAMES
from pdmesh.engine.gguf.gguf_reader import F32, TYPES, StoredTensor, read_parts
from pdmesh.engine.grouped import GroupedWeight, of_blocks
from pdmesh.engine.unused import check_unused
from pdmesh.errors import ConfigError
from pdmesh.kv_layout import IndexRange

_LAYER = re.compile(r"(?:model\.layers|h)\.(\d+)\.(.+)")
#: Number of a part of a stored tensor: of an expert, or a head.
_NUMBER = re.compile(r"\.(\d+)(?=\.|$)")
#: Biases that a layer may lack. llama.cpp adds each one that exists.
_BIAS = re.compile(r"blk\.\d+\.(attn_(q|k|v|qkv|output)|ffn_(gate|up|down))\.bias")
#: Ending of a delta net's decays, stored as negative numbers instead of the logarithms of their sizes.
_DECAY = ".ssm_a"
#: Number of values that are dequantised at once. Their fp32 copy is small beside the weight.
_PANEL_VALUES = 1 << 22


class _Place(NamedTuple):
    """Place of a tensor: all of a stored one, or the part with a number. ``name`` is empty if files have no such kind.

    A part is an expert's or a head's matrix.
    """

    name: str
    number: int | None


class GgufTensors:
    """`pdmesh.engine.tensors.Tensors` of a GGUF file. Values are in ``dtype`` unless stored in fp32."""

    def __init__(self, files: Sequence[Path], dtype: torch.dtype) -> None:
        self._file = files[0]
        self._dtype = dtype
        header = read_parts(files, strings=False)
        self._tensors = header.tensors
        name = str(header.metadata.get("general.architecture"))
        architecture, self._model = ARCHITECTURES.get(name), GgufModel(name, header, str(self._file))
        self._layer_names = {**LAYER_NAMES, **(architecture.names if architecture is not None else {})}
        self._own_scales = {own for own in self._layer_names.values() if own.endswith(".scale")}

    def __contains__(self, name: str) -> bool:
        return self._place(name).name in self._tensors

    def check(self, name: str, shape: tuple[int, ...]) -> Sequence[str]:
        place = self._place(name)
        if self._is_absent_bias(place):
            return ()
        found = self._find(name, place)
        sizes, found_sizes = ([size for size in each if size > 1] for each in (shape, found.shape))
        if sizes != found_sizes and shape != (prod(found.shape),):
            raise ConfigError(f"{self._file}: tensor {name!r} has shape {found.shape}; its header needs {shape}")
        kind = TYPES[found.type_number]
        if len(shape) == 1 and kind.num_values > 1:
            raise ConfigError(f"{self._file}: tensor {name!r} is a vector in {kind.name}; only matrices are quantised")
        scale = self._scale_name(place)
        return (place.name, scale) if scale in self._tensors else (place.name,)

    def check_all_used(self, used: Set[str]) -> None:
        own_names = used | {self._place(name).name for name in used}
        unused = {name for name in self._tensors.keys() - own_names if not self._is_of_draft_layer(name)}
        check_unused(unused, str(self._file), lambda name: self._values(self._tensors[name]))

    def read(self, name: str, shape: tuple[int, ...], rows: IndexRange | None = None) -> Tensor:
        self.check(name, shape)
        place = self._place(name)
        if self._is_absent_bias(place):
            return torch.zeros(shape if rows is None else (rows.size,))
        stored = replace(self._find(name, place), shape=shape)
        values = self._values(stored, rows).view(-1, *shape[1:])
        if place.name.endswith(_DECAY):
            values = (-values).double().log().to(values.dtype)  # the same on every processor
        return values if (scale := self._scale(place)) is None else (values.float() * scale).to(values.dtype)

    def grouped(self, name: str, shape: tuple[int, ...], rows: IndexRange | None = None) -> GroupedWeight | None:
        self.check(name, shape)
        place = self._place(name)
        stored = self._find(name, place)
        if stored.type_number not in GROUPED:
            return None
        data = _blocks(stored, rows)
        kind = TYPES[stored.type_number]
        weight = of_blocks(GROUPED[stored.type_number](data), len(data) * kind.num_values // shape[1])
        if (scale := self._scale(place)) is not None:
            weight = replace(weight, scales=weight.scales.times(scale))
        if not weight.is_finite:
            raise ConfigError(
                f"{self._file}: tensor {name!r} has scales that are not finite numbers; download it again"
            )
        return weight

    def _values(self, stored: StoredTensor, rows: IndexRange | None = None) -> Tensor:
        """Return a tensor's values, or some of its rows: in fp32 if stored so, else in the dtype of the computation."""
        data, kind = _blocks(stored, rows), TYPES[stored.type_number]
        dtype = torch.float32 if stored.type_number == F32 else self._dtype
        out = torch.empty(len(data), kind.num_values, dtype=dtype)
        panel = _PANEL_VALUES // kind.num_values
        for begin in range(0, len(data), panel):
            blocks = slice(begin, begin + panel)
            out[blocks] = values_of(stored.type_number, data[blocks])
        return out.view(-1, *stored.shape[1:])

    def _scale(self, place: _Place) -> float | None:
        """Return NVFP4's factor of a whole weight; None without one. Raise ConfigError if it is malformed."""
        name = self._scale_name(place)
        stored = self._tensors.get(name)
        if stored is None:
            return None
        if stored.shape != (1,) or stored.type_number != F32:
            raise ConfigError(f"{self._file}: tensor {name!r} is not one number in fp32")
        return float(self._values(stored))

    def _scale_name(self, place: _Place) -> str:
        """Return the name of a weight's scale, or an empty one if the architecture has another use for the scale."""
        name = place.name.removesuffix("weight") + "scale"
        return "" if name.split(".", 2)[-1] in self._own_scales else name

    def _is_absent_bias(self, place: _Place) -> bool:
        """Return whether a tensor is a bias that this layer lacks, and other layers or projections may have."""
        return place.name not in self._tensors and _BIAS.fullmatch(place.name) is not None

    def _is_of_draft_layer(self, own_name: str) -> bool:
        """Return whether a tensor is of the last layers, which draft further tokens and are not computed."""
        found, num_drafts = re.match(r"blk\.(\d+)\.", own_name), self._model.num_draft_layers
        return bool(num_drafts) and found is not None and int(found[1]) >= self._model.num_layers

    def _find(self, name: str, place: _Place) -> StoredTensor:
        stored = self._tensors.get(place.name)
        if stored is None:
            what = "" if place.number is None else " with all experts or heads of a layer"
            raise ConfigError(f"{self._file} holds no tensor {place.name or name!r}{what}")
        if place.number is None:
            return stored
        num_parts, *shape = stored.shape
        if not shape or place.number >= num_parts:
            shape_here = f"shape {stored.shape}, without part {place.number}"
            raise ConfigError(f"{self._file}: tensor {place.name!r} has {shape_here}")
        num_bytes = stored.num_bytes // num_parts
        offset = stored.offset + place.number * num_bytes
        return StoredTensor(tuple(shape), stored.type_number, stored.file, offset, num_bytes)

    def _place(self, name: str) -> _Place:
        whole, _, end = name.rpartition(".")
        if end not in ("weight", "bias"):
            whole, end = name, ""
        layer, number = _LAYER.fullmatch(whole), None
        if layer is None:
            own = NAMES.get(whole)
        else:
            if (found := _NUMBER.search(layer[2])) is not None:
                number = int(found[1])
            own = self._layer_names.get(_NUMBER.sub("", layer[2]))
            own = own and f"blk.{layer[1]}.{own}"
        return _Place(f"{own}.{end}" if own and end else own or "", number)


def _blocks(stored: StoredTensor, rows: IndexRange | None) -> Tensor:
    """Return a tensor's blocks (n, bytes), or the blocks of some rows."""
    kind = TYPES[stored.type_number]
    first, stop = rows or (0, stored.shape[0])
    row_blocks = stored.num_bytes // kind.num_bytes // stored.shape[0]
    num_blocks = (stop - first) * row_blocks
    offset = stored.offset + first * row_blocks * kind.num_bytes
    data = np.memmap(stored.file, dtype=np.uint8, mode="c", offset=offset, shape=(num_blocks, kind.num_bytes))
    return torch.from_numpy(data)
