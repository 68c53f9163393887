"""Sources of weights: the safetensors files of a checkpoint, plain or quantised, or a random generator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from pdmesh.engine import bitsandbytes
from pdmesh.engine.files import weight_files
from pdmesh.engine.fused_experts import FusedExpertTensors
from pdmesh.engine.gguf.gguf_tensors import GgufTensors
from pdmesh.engine.grouped import CODE_BITS, GroupedWeight, grouped, of_float8
from pdmesh.engine.model_config import ModelConfig, Quantization, QuantizedFormat
from pdmesh.engine.quantized import Layout, LayoutError, Shape, Stored, Weight, layout_of
from pdmesh.engine.stored import FileTensors, StoredFiles
from pdmesh.engine.tensor_names import TensorNames
from pdmesh.errors import ConfigError
from pdmesh.kv_layout import IndexRange

_WEIGHT = ".weight"


class Tensors(Protocol):
    """Weights by name."""

    def __contains__(self, name: str) -> bool:
        """Return whether a tensor of this name is stored."""
        ...

    def check(self, name: str, shape: Shape) -> Sequence[str]:
        """Return the names of the stored tensors that make up a weight.

        Raise ConfigError unless they are stored in this shape. Call before memory is allocated for the sizes in
        config.json.
        """
        ...

    def check_all_used(self, used: Set[str]) -> None:
        """Raise ConfigError for a stored tensor that is not among ``used`` and may change what the model computes."""
        ...

    def read(self, name: str, shape: Shape, rows: IndexRange | None = None) -> Tensor:
        """Return a tensor of this shape, or some of its rows, valid until the files are closed."""
        ...

    def grouped(self, name: str, shape: Shape, rows: IndexRange | None = None) -> GroupedWeight | None:
        """Return a matrix in its quantised form, or None if it is plain, or kernels cannot multiply this form."""
        ...


class RandomTensors:
    """Random matrices and vectors of ones. Matrices are quantised if ``quantization`` is by codes.

    The deviation is 1 / sqrt(inputs), so that activations neither vanish nor grow.
    """

    def __init__(
        self, dtype: torch.dtype, device: torch.device, seed: int, quantization: Quantization | None = None
    ) -> None:
        self._dtype = dtype
        self._quantization = quantization
        self._generator = torch.Generator(device).manual_seed(seed)

    def __contains__(self, name: str) -> bool:
        return False

    def check(self, name: str, shape: Shape) -> Sequence[str]:
        return ()

    def check_all_used(self, used: Set[str]) -> None:
        pass

    def read(self, name: str, shape: Shape, rows: IndexRange | None = None) -> Tensor:
        device = self._generator.device
        if len(shape) == 1:
            return some(torch.ones(shape, dtype=self._dtype, device=device), rows)
        tensor = torch.empty(shape, dtype=self._dtype, device=device)
        return some(tensor.normal_(0, shape[1] ** -0.5, generator=self._generator), rows)  # the same on every rank

    def grouped(self, name: str, shape: Shape, rows: IndexRange | None = None) -> GroupedWeight | None:
        if self._quantization is None or self._quantization.bits not in CODE_BITS:
            return None
        match self._quantization.format:
            case QuantizedFormat.FLOAT8 | QuantizedFormat.FLOAT8_BLOCKS:
                weight = self._floats(shape, self._quantization.block)
            case QuantizedFormat.BITSANDBYTES_4:
                weight = self._numbers(shape)
            case _:
                weight = self._integers(shape, self._quantization)
        return weight if weight is None or rows is None else weight.rows(torch.arange(*rows))

    def _integers(self, shape: Shape, quantization: Quantization) -> GroupedWeight | None:
        bits, (outputs, inputs) = quantization.bits, shape
        codes = torch.randint(0, 1 << bits, (outputs, inputs), generator=self._generator, dtype=torch.uint8)
        size = quantization.group_size or inputs
        deviation = (1 << bits) / 12**0.5
        scales = torch.full((outputs, -(-inputs // size)), inputs**-0.5 / deviation).bfloat16().float()
        return grouped(codes, scales, None, torch.arange(inputs) // size, bits=bits)

    def _floats(self, shape: Shape, block: tuple[int, int]) -> GroupedWeight | None:
        outputs, inputs = shape
        deviation, size = 100.0, block[1] or inputs
        values = torch.empty(shape).normal_(0, deviation, generator=self._generator).clamp_(-448, 448)
        scales = torch.full((outputs, -(-inputs // size)), inputs**-0.5 / deviation).bfloat16().float()
        return of_float8(values.to(torch.float8_e4m3fn), scales, torch.arange(inputs) // size)

    def _numbers(self, shape: Shape) -> GroupedWeight | None:
        outputs, inputs = shape
        codes = torch.randint(0, 16, shape, generator=self._generator, dtype=torch.uint8)
        scales = bitsandbytes.BlockScales(torch.full((-(-outputs * inputs // 64),), inputs**-0.5 / 0.6))
        return bitsandbytes.TableWeight(codes, torch.linspace(-1, 1, 16), scales).grouped(4)


@dataclass(frozen=True, slots=True)
class UnreadTensors:
    """Stand-in for tensors in a check of names and shapes. It records the names in ``used``, and reads nothing."""

    tensors: Tensors
    used: set[str] = field(default_factory=set[str])

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def check(self, name: str, shape: Shape) -> Sequence[str]:
        names = self.tensors.check(name, shape)
        self.used.update(names)
        return names

    def check_all_used(self, used: Set[str]) -> None:
        self.tensors.check_all_used(used)

    def read(self, name: str, shape: Shape, rows: IndexRange | None = None) -> Tensor:
        self.check(name, shape)
        return some(torch.empty(shape, device="meta"), rows)

    def grouped(self, name: str, shape: Shape, rows: IndexRange | None = None) -> GroupedWeight | None:
        return None


class QuantizedTensors(FileTensors):
    """`Tensors` of a quantised checkpoint. Values are computed, and rounded once to ``dtype``."""

    def __init__(self, directory: Path, files: StoredFiles, layout: Layout, bits: int, dtype: torch.dtype) -> None:
        super().__init__(directory, files)
        self._layout = layout
        self._bits = bits
        self._dtype = dtype

    def check(self, name: str, shape: Shape) -> Sequence[str]:
        if not self._is_quantized(name):
            return super().check(name, shape)
        parts = self._stored(name, shape)
        used = [part for part, stored in parts.items() if part in self or not stored.is_optional]
        for part in used:
            self.check_stored(part, parts[part])
        return used

    def read(self, name: str, shape: Shape, rows: IndexRange | None = None) -> Tensor:
        if not self._is_quantized(name):
            return super().read(name, shape, rows)
        out = torch.empty(shape, dtype=self._dtype)
        self._weight(name, shape).write(out)
        return some(out, rows)

    def grouped(self, name: str, shape: Shape, rows: IndexRange | None = None) -> GroupedWeight | None:
        if not self._is_quantized(name):
            return None
        weight = self._weight(name, shape).grouped(self._bits)
        if weight is not None and not weight.is_finite:
            raise ConfigError(f"{name}: the quantised weight has values that are not finite numbers; download it again")
        return weight if weight is None or rows is None else weight.rows(torch.arange(*rows))

    def _weight(self, name: str, shape: Shape) -> Weight:
        self.check(name, shape)
        stored, ends = self._stored(name, shape), self._layout.tensors(*shape)
        found = {end: self.read_stored(part) for end, part in zip(ends, stored, strict=True) if part in self}
        try:
            return self._layout.weight(found, *shape)
        except LayoutError as error:
            raise ConfigError(f"{name}: the quantised weight {error}; download the checkpoint again") from error

    def _stored(self, name: str, shape: Shape) -> dict[str, Stored]:
        """Return a weight's stored tensors by their whole names."""
        prefix = name.removesuffix(_WEIGHT)
        return {f"{prefix}.{end}": stored for end, stored in self._layout.tensors(*shape).items()}

    def _is_quantized(self, name: str) -> bool:
        prefix = name.removesuffix(_WEIGHT)
        return name.endswith(_WEIGHT) and any(f"{prefix}.{marker}" in self for marker in self._layout.markers)


def some(tensor: Tensor, rows: IndexRange | None) -> Tensor:
    """Return rows of a tensor, all if ``rows`` is None."""
    return tensor if rows is None else tensor[slice(*rows)]


@contextmanager
def open_tensors(directory: Path, config: ModelConfig, dtype: torch.dtype) -> Iterator[Tensors]:
    """Yield the weights of a checkpoint."""
    quantization = config.quantization
    if quantization is not None and quantization.format is QuantizedFormat.GGUF:
        yield GgufTensors(weight_files(directory), dtype)
        return
    with ExitStack() as stack:
        files: StoredFiles = {}
        guessing = range(config.num_layers, config.num_layers + config.num_guessing_layers)
        unread = tuple(f"{config.names.layer.format(number)}." for number in guessing)
        for path in weight_files(directory):
            file = stack.enter_context(safe_open(path, framework="pt"))
            names = {_name_of(name, config.names): name for name in file.keys()}  # noqa: SIM118
            files |= {here: (file, name) for here, name in names.items() if not here.startswith(unread)}
        if config.names.fuses_experts and not any(".experts.0." in name for name in files):
            yield FusedExpertTensors(directory, files, config)
        elif quantization is None:
            yield FileTensors(directory, files)
        else:
            yield QuantizedTensors(directory, files, _layout_of(quantization), quantization.bits, dtype)


def _layout_of(quantization: Quantization) -> Layout:
    if quantization.format in (QuantizedFormat.BITSANDBYTES_4, QuantizedFormat.BITSANDBYTES_8):
        return bitsandbytes.layout(quantization)
    return layout_of(quantization)


def _name_of(name: str, names: TensorNames) -> str:
    """Return the name here of a file's tensor."""
    for before, after in names.renames:
        if name.startswith(before):
            name = after + name.removeprefix(before)
            break
    for before, after in names.parts:
        name = name.replace(before, after)
    # Embedding checkpoints contain the bare model, whose names have no prefix.
    is_bare = names.embedding.startswith("model.") and not name.startswith(("model.", "lm_head."))
    return f"model.{name}" if is_bare else name
