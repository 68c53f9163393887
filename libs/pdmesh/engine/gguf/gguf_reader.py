"""The header of a GGUF file (versions 2 and 3, little-endian): metadata, and the places of tensors.

A model may be split into several files. Nothing is allocated from a length in a file: strings and lists are read only
as far as the file extends.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pdmesh.errors import ConfigError

_MAGIC = b"GGUF"
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: Mapping[int, str] = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", _BOOL: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_MAX_DIMS = 4
_MAX_NAME = 64
_MAX_STRINGS = 1 << 24
_MAX_PARTS = 1000
_LENGTH = struct.Struct("<Q")
#: Name of one part of a split model, with its number (from 1 on) and the number of parts.
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_DEFAULT_ALIGNMENT = 32


class StoredType(NamedTuple):
    """Storage of a type of values: blocks of ``num_values`` values in ``num_bytes`` bytes."""

    name: str
    num_values: int
    num_bytes: int


#: Type number of vectors.
F32 = 0
#: Served types, by type number.
TYPES: Mapping[int, StoredType] = {
    F32: StoredType("F32", 1, 4),
    1: StoredType("F16", 1, 2),
    2: StoredType("Q4_0", 32, 18),
    3: StoredType("Q4_1", 32, 20),
    6: StoredType("Q5_0", 32, 22),
    7: StoredType("Q5_1", 32, 24),
    8: StoredType("Q8_0", 32, 34),
    10: StoredType("Q2_K", 256, 84),
    11: StoredType("Q3_K", 256, 110),
    12: StoredType("Q4_K", 256, 144),
    13: StoredType("Q5_K", 256, 176),
    14: StoredType("Q6_K", 256, 210),
    16: StoredType("IQ2_XXS", 256, 66),
    17: StoredType("IQ2_XS", 256, 74),
    18: StoredType("IQ3_XXS", 256, 98),
    19: StoredType("IQ1_S", 256, 50),
    20: StoredType("IQ4_NL", 32, 18),
    21: StoredType("IQ3_S", 256, 110),
    22: StoredType("IQ2_S", 256, 82),
    23: StoredType("IQ4_XS", 256, 136),
    29: StoredType("IQ1_M", 256, 56),
    30: StoredType("BF16", 1, 2),
    34: StoredType("TQ1_0", 256, 54),
    35: StoredType("TQ2_0", 256, 66),
    39: StoredType("MXFP4", 32, 17),
    40: StoredType("NVFP4", 64, 36),
    41: StoredType("Q1_0", 128, 18),
    42: StoredType("Q2_0", 64, 18),
}
#: Names of GGML's other current and former types, which are not served for weights.
_OTHER_TYPES: Mapping[int, str] = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Shape, type and place of a tensor in a file. ``shape`` begins with the outermost dimension."""

    shape: tuple[int, ...]
    type_number: int
    file: Path
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata and tensors of a file. Long lists in the metadata hold plain values."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]


def read_header(path: Path, *, strings: bool = True) -> GgufHeader:
    """Read the header of one file. Without ``strings``, lists of strings are empty.

    Raise ConfigError for a file that cannot be read, is not a GGUF file, is damaged, or has tensors of a type
    that is not served.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(data, path, reads_strings=strings).header()
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except (struct.error, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is a damaged GGUF file; download it again") from error


def part_paths(path: Path) -> list[Path]:
    """Return all files of the model that ``path`` is a part of by its name, or ``path`` alone if it is no part."""
    found = _PART.fullmatch(path.name)
    if found is None or not 1 < int(found[3]) <= _MAX_PARTS:
        return [path]
    return [path.with_name(f"{found[1]}-{number:05d}-of-{found[3]}.gguf") for number in range(1, int(found[3]) + 1)]


def read_parts(paths: Sequence[Path], *, strings: bool = True) -> GgufHeader:
    """Read the headers of a model's files as one, with the first file's metadata. Raise ConfigError."""
    if missing := [path for path in paths if not path.is_file()]:
        names = ", ".join(path.name for path in missing[:3]) + (", …" if len(missing) > 3 else "")
        raise ConfigError(
            f"{paths[0].parent}: the model is split into {len(paths)} files, and there is no {names}; put all parts "
            "into one folder"
        )
    headers = [read_header(path, strings=strings and path == paths[0]) for path in paths]
    tensors: dict[str, StoredTensor] = {}
    for number, (path, header) in enumerate(zip(paths, headers, strict=True)):
        place = header.metadata.get("split.no", 0), header.metadata.get("split.count") or 1
        if place != (number, len(paths)):
            shown = " of ".join(str(each + 1 - which) for which, each in enumerate(place) if isinstance(each, int))
            raise ConfigError(
                f"{path} is part {shown} of a split model by its header, but part {number + 1} of {len(paths)} by its "
                "name; restore the published name (…-00001-of-00002.gguf)"
            )
        if doubled := tensors.keys() & header.tensors.keys():
            raise ConfigError(f"{path}: tensor {min(doubled)!r} is in another part as well; download the parts again")
        tensors |= header.tensors
    total = headers[0].metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise ConfigError(f"{paths[0]}: its parts hold {len(tensors)} tensors of {total}; download them again")
    return replace(headers[0], tensors=tensors)


class _Parser:
    def __init__(self, data: mmap.mmap, path: Path, *, reads_strings: bool) -> None:
        self._data = data
        self._path = path
        self._reads_strings = reads_strings
        self._place = 0

    def header(self) -> GgufHeader:
        if self._take(4) != _MAGIC:
            raise ConfigError(f"{self._path} is not a GGUF file")
        version = self._number("<I")
        if version not in (2, 3):
            raise ConfigError(f"{self._path} is a GGUF file of version {version}; supported are 2 and 3, little-endian")
        num_tensors, num_fields = self._number("<Q"), self._number("<Q")
        metadata: dict[str, Any] = {}
        for _ in range(self._bounded(num_fields, least_bytes=13)):
            name = self._string()
            metadata[name] = self._value(self._number("<I"))
        infos: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(self._bounded(num_tensors, least_bytes=32)):
            name, num_dims = self._string(), self._number("<I")
            if len(name) > _MAX_NAME or not name.isprintable():
                raise self._damaged("a tensor's name is invalid")
            if not 0 < num_dims <= _MAX_DIMS:
                raise self._damaged(f"tensor {name!r} has {num_dims} dimensions")
            shape = tuple(reversed([self._number("<Q") for _ in range(num_dims)]))
            infos[name] = shape, self._number("<I"), self._number("<Q")
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise self._damaged(f"general.alignment is {alignment!r}")
        begin = -(-self._place // alignment) * alignment
        tensors = {name: self._tensor(name, *info, begin) for name, info in infos.items()}
        return GgufHeader(metadata, tensors)

    def _tensor(self, name: str, shape: tuple[int, ...], type_number: int, offset: int, begin: int) -> StoredTensor:
        stored = TYPES.get(type_number)
        if stored is None:
            served = ", ".join(each.name for each in TYPES.values())
            kind = _OTHER_TYPES.get(type_number, f"number {type_number}")
            raise ConfigError(
                f"{self._path}: tensor {name!r} is of GGML's type {kind}, which is not supported; use one of {served}"
            )
        num_values = 1
        for size in shape:
            num_values *= size
        if shape[-1] % stored.num_values:
            raise self._damaged(f"tensor {name!r} has rows of {shape[-1]} values in blocks of {stored.num_values}")
        num_bytes = num_values // stored.num_values * stored.num_bytes
        if num_values == 0 or begin + offset + num_bytes > len(self._data):
            raise self._damaged(f"tensor {name!r} reaches beyond the file")
        return StoredTensor(shape, type_number, self._path, begin + offset, num_bytes)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            of, length = self._number("<I"), self._number("<Q")
            if of == _STRING:
                return self._strings(self._bounded(length, least_bytes=_LENGTH.size))
            return self._scalars(of, length)
        return self._number(self._format(kind))

    def _strings(self, count: int) -> list[str]:
        """Read a list of ``count`` strings, which may be as long as a vocabulary."""
        if count > _MAX_STRINGS:
            raise self._damaged(f"a list has {count} strings")
        data, place, end, length_at = self._data, self._place, len(self._data), _LENGTH.unpack_from
        found: list[str] = []
        for _ in range(count):
            (length,) = length_at(data, place)
            first = place + _LENGTH.size
            place = first + length
            if place > end:
                raise self._damaged("it is cut off")
            if self._reads_strings:
                found.append(data[first:place].decode("utf-8", errors="replace"))
        self._place = place
        return found

    def _scalars(self, kind: int, length: int) -> list[Any]:
        form = self._format(kind)
        size = struct.calcsize(form)
        data = self._take(self._bounded(length, least_bytes=size) * size)
        values: list[Any] = np.frombuffer(data, dtype=form).tolist()
        return values

    def _format(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise self._damaged(f"a field is of type {kind}")
        return _SCALARS[kind]

    def _string(self) -> str:
        length = self._number("<Q")
        return self._take(self._bounded(length, least_bytes=1)).decode("utf-8", errors="replace")

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _bounded(self, number: int, *, least_bytes: int) -> int:
        """Return ``number`` if as many items of ``least_bytes`` fit the rest of the file, else raise ConfigError."""
        if number * least_bytes > len(self._data) - self._place:
            raise self._damaged("it is shorter than its header says")
        return number

    def _take(self, num_bytes: int) -> bytes:
        data = self._data[self._place : self._place + num_bytes]
        if len(data) < num_bytes:
            raise self._damaged("it is cut off")
        self._place += num_bytes
        return data

    def _damaged(self, how: str) -> ConfigError:
        return ConfigError(f"{self._path} is a damaged GGUF file ({how}); download it again")
