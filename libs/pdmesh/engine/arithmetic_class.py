"""Arithmetic class of an engine: two engines share the name only if they compute the same bits."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

#: Keys in /proc/cpuinfo that identify a processor, on x86-64 and on aarch64.
_IDENTITY = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")

#: Environment variables that cap the instruction set of torch's libraries. ATEN_CPU_CAPABILITY needs no entry, because
#: torch's own capability reflects it.
_CAPS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR")


def class_name(dtype: str, kinds: Iterable[str]) -> str:
    """Return the class name, such as ``bfloat16/ordered-2``. Several ``kinds``, of a model's parts, are joined by +."""
    return f"{dtype}/{'+'.join(sorted(set(kinds)))}"


def torch_kind(device: torch.device, *, deterministic: bool) -> str:
    """Return the kind of torch's own operators: torch's version, and the processor or device, which affect rounding.

    Results of a ``deterministic`` kind do not depend on the batch. Other results of one kind may differ by a rounding
    error even on one machine.
    """
    where = torch.cuda.get_device_name(device).replace(" ", "-") if device.type == "cuda" else _processor()
    return f"torch-{torch.__version__}-{where}{'-tiled' if deterministic else ''}"


def _processor() -> str:
    capability = torch.backends.cpu.get_cpu_capability().replace(" ", "-")
    caps = [f"{name}={value}" for name in _CAPS if (value := os.environ.get(name))]
    return "-".join([capability, *(_identity(_cpuinfo()) or [platform.machine()]), *caps])


def _identity(cpuinfo: Mapping[str, str]) -> list[str]:
    return [cpuinfo[name] for name in _IDENTITY if name in cpuinfo]


def _cpuinfo() -> dict[str, str]:
    """Return the fields of the first core in /proc/cpuinfo, or an empty dictionary if the file cannot be read."""
    try:
        first, _, _ = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}
