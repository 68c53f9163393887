"""Compiled CPU kernels: a library for each processor level, and the choice among them.

All libraries of the *ordered* kind have the same source and give the same bits. The *dot* kind uses the processor's own
bf16 products, which are faster and round otherwise.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from pdmesh.errors import ConfigError

#: Folder of the libraries ``_kernels.LEVEL.so``.
FOLDER = Path(__file__).parent

#: Version of each kind's arithmetic. Increase it when a change of the kernels, or of their inputs, changes a bit of any
#: result.
_ORDERED_VERSION, _DOT_VERSION = 4, 3


class CpuLevel(StrEnum):
    """Processor features that a library needs, the fastest first. BASELINE is any x86-64, and NEON any aarch64."""

    AMX = "amx"
    AVX512_BF16 = "avx512_bf16"
    AVX512 = "avx512"
    AVX2 = "avx2"
    BASELINE = "baseline"
    NEON = "neon"

    @property
    def is_ordered(self) -> bool:
        """Whether the level gives the same bits as every other ordered level."""
        return self not in (CpuLevel.AMX, CpuLevel.AVX512_BF16)

    @property
    def kind(self) -> str:
        """Name of the level's arithmetic. Levels with the same name give the same bits."""
        if self.is_ordered:
            return f"ordered-{_ORDERED_VERSION}"
        return f"dot-{'amx' if self is CpuLevel.AMX else 'avx512bf16'}-{_DOT_VERSION}"

    @property
    def suffixes(self) -> Mapping[str, str]:
        """Suffixes of the level's function names, by dtype."""
        return {"bfloat16": "", "float16": "_f16"} if self.is_ordered else {"bfloat16": ""}


@dataclass(frozen=True, slots=True)
class KernelLibrary:
    """Functions of one level for one dtype. ``csrc`` documents their arguments."""

    level: CpuLevel
    dtype: str
    attention: Callable[..., None]
    add_norm: Callable[..., None]
    norm: Callable[..., None]
    norm_heads: Callable[..., None]
    rotate_and_store: Callable[..., None]
    gate: Callable[..., None]
    gated_silu: Callable[..., None]
    linear: Callable[..., None]
    pack_linear: Callable[..., None]
    unpack_rows: Callable[..., None]
    linear_packed: Callable[..., None]
    linear_rounded: Callable[..., None]
    pack_codes: Callable[..., None]
    unpack_codes: Callable[..., None]


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The compiled kernels that compute here (None: torch does), and the reason for the choice."""

    library: KernelLibrary | None
    reason: str


def compiled_levels() -> tuple[str, ...]:
    """Return the levels that were compiled in this pdmesh's build, the fastest first. Empty without a compiler."""
    return tuple(level for level in CpuLevel if _path(level).exists())


@cache
def processor_levels() -> tuple[CpuLevel, ...]:
    """Return this processor's levels, the fastest first. Empty if no kernels were compiled."""
    try:
        probe = ctypes.CDLL(str(_path("probe")))
    except OSError:
        return ()
    probe.pdmesh_levels.restype = ctypes.c_char_p
    return tuple(CpuLevel(name) for name in probe.pdmesh_levels().decode().split())


def check_cpu_level(cpu_level: str) -> None:
    """Raise ConfigError if kernels were compiled and the processor lacks ``cpu_level``."""
    available = processor_levels()
    if available and cpu_level != "auto" and cpu_level not in available:
        raise ConfigError(f"worker.cpu_level is {cpu_level}, but this processor has only {', '.join(available)}")


def choose_kernels(dtype: str, *, cpu_level: str = "auto", ordered: bool = False) -> KernelChoice:
    """Return the fastest kernels for ``dtype`` that were compiled and that this processor can run.

    Without such kernels, the choice has no library. ``cpu_level`` names the highest level to use. ``ordered`` allows
    only ordered levels, which all give the same bits. Raises ConfigError if kernels were compiled and the processor
    lacks ``cpu_level``.
    """
    available = processor_levels()
    if not available:
        return KernelChoice(None, "no kernels were compiled when pdmesh was installed")
    reason = "the processor's best level"
    check_cpu_level(cpu_level)
    if cpu_level != "auto":
        available = available[available.index(CpuLevel(cpu_level)) :]
        reason = f"worker.cpu_level is {cpu_level}"
    for level in available:
        if dtype not in level.suffixes:
            reason = f"{level} does not compute {dtype}"
        elif ordered and not level.is_ordered:
            reason = f"{level} does not sum in order"
        elif (library := load_library(level, dtype)) is not None:
            return KernelChoice(library, reason)
        else:
            reason = f"{level} kernels were not compiled"
    return KernelChoice(None, reason)


def load_library(level: CpuLevel, dtype: str = "bfloat16", folder: Path = FOLDER) -> KernelLibrary | None:
    """Load one level's kernels. Return None if they were not compiled, or the system does not grant the level.

    The processor must have the level. Kernels that were compiled from an earlier interface version count as not
    compiled.
    """
    if (library := open_library(level, folder)) is None:
        return None
    if not level.is_ordered:
        granted = library.pdmesh_prepare()
        if granted < (2 if level is CpuLevel.AMX else 1):
            return None
        library.pdmesh_use_amx(level is CpuLevel.AMX)
    return KernelLibrary(level, dtype, **dict(_functions(library, level.suffixes[dtype])))


def open_library(level: CpuLevel, folder: Path = FOLDER) -> ctypes.CDLL | None:
    """Open one level's library, or return None if no library with this interface version was compiled."""
    importlib.import_module("torch")  # libraries share torch's thread pool if torch is loaded first
    try:
        library = ctypes.CDLL(str(_path("avx512_bf16" if level is CpuLevel.AMX else level, folder)))
    except OSError:
        return None
    is_ours = hasattr(library, "pdmesh_interface") and library.pdmesh_interface() == _INTERFACE
    return library if is_ours else None


def _path(level: str, folder: Path = FOLDER) -> Path:
    return folder / f"_kernels.{level}.so"


#: Version of the interface, equal to the number in ``csrc/memory.h``.
_INTERFACE = 11
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_ARGUMENTS: Mapping[str, list[Any]] = {
    "attention": [_POINTER, _INT, *[_POINTER] * 5, _INT, _POINTER, *[_INT] * 5, _FLOAT, _INT, _FLOAT, _INT],
    "add_norm": [*[_POINTER] * 4, _INT, _INT, _FLOAT, _INT],
    "norm": [_POINTER, _INT, _POINTER, _POINTER, _INT, _INT, _FLOAT, _INT],
    "norm_heads": [_POINTER, _INT, _POINTER, *[_INT] * 3, _FLOAT, _INT],
    "rotate_and_store": [_POINTER, _INT, *[_POINTER] * 4, *[_INT] * 7],
    "gate": [_POINTER, _POINTER, *[_INT] * 4],
    "gated_silu": [_POINTER, _POINTER, _INT, _INT, _INT],
    "linear": [*[_POINTER] * 4, *[_INT] * 5],
    "pack_linear": [_POINTER, _POINTER, _INT, _INT],
    "unpack_rows": [*[_POINTER] * 3, _INT, _INT],
    "linear_packed": [*[_POINTER] * 4, *[_INT] * 5],
    "linear_rounded": [*[_POINTER] * 4, *[_INT] * 5],
    "pack_codes": [_POINTER, _POINTER, _INT, _INT, _INT],
    "unpack_codes": [*[_POINTER] * 3, _INT, _INT],
}
#: Functions that are the same for every dtype.
_MOVES = ("pack_linear", "unpack_rows", "pack_codes", "unpack_codes")


def _functions(library: ctypes.CDLL, suffix: str) -> Iterator[tuple[str, Callable[..., None]]]:
    for name, arguments in _ARGUMENTS.items():
        function = library[f"pdmesh_{name}{'' if name in _MOVES else suffix}"]  # a new object each time
        function.argtypes, function.restype = arguments, None
        yield name, function
