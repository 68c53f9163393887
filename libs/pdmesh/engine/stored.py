"""Tensors as stored in the safetensors files of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from pdmesh.engine.grouped import GroupedWeight
from pdmesh.engine.quantized import FLOATS, Shape, Stored
from pdmesh.engine.unused import check_unused
from pdmesh.errors import ConfigError
from pdmesh.kv_layout import IndexRange

#: The open file with a tensor, and the tensor's name in it, by the tensor's name here.
StoredFiles = dict[str, tuple[Any, str]]


class FileTensors:
    """`pdmesh.engine.tensors.Tensors` of tensors that are stored plainly."""

    def __init__(self, directory: Path, files: StoredFiles) -> None:
        self._directory = directory
        self._files = files

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def check(self, name: str, shape: Shape) -> Sequence[str]:
        self.check_stored(name, Stored((shape,), FLOATS))
        return (name,)

    def check_all_used(self, used: Set[str]) -> None:
        check_unused(self._files.keys() - used, str(self._directory), self.read_stored)

    def check_stored(self, name: str, stored: Stored) -> None:
        """Raise ConfigError unless a tensor is stored in one of the shapes and types."""
        if name not in self._files:
            raise ConfigError(f"{self._directory}: the weights hold no tensor {name!r}")
        file, own_name = self._files[name]
        try:
            part = file.get_slice(own_name)
            found, dtype = tuple(part.get_shape()), part.get_dtype()
        except SafetensorError as error:
            raise ConfigError(f"{self._directory}: tensor {name!r} cannot be read: {error}") from error
        if found not in stored.shapes and not (len(found) == 1 and found[0] <= stored.most):
            needed = " or ".join(map(str, stored.shapes))
            raise ConfigError(f"{self._directory}: tensor {name!r} has shape {found}; config.json needs {needed}")
        if dtype not in stored.dtypes:
            raise ConfigError(
                f"{self._directory}: tensor {name!r} is {dtype}; config.json needs {' or '.join(sorted(stored.dtypes))}"
            )

    def read(self, name: str, shape: Shape, rows: IndexRange | None = None) -> Tensor:
        self.check(name, shape)
        return self.read_stored(name, rows)

    def grouped(self, name: str, shape: Shape, rows: IndexRange | None = None) -> GroupedWeight | None:
        return None

    def read_stored(self, name: str, rows: IndexRange | None = None) -> Tensor:
        """Return a tensor that was checked before, or some of its rows. Raise ConfigError if it cannot be read."""
        file, own_name = self._files[name]
        try:
            tensor: Tensor = file.get_tensor(own_name) if rows is None else file.get_slice(own_name)[slice(*rows)]
        except SafetensorError as error:
            raise ConfigError(f"{self._directory}: tensor {name!r} cannot be read: {error}") from error
        return tensor
