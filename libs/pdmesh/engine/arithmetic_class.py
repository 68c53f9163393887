"""The arithmetic class of what computes here: a name that two engines share only if they compute the same bits."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

#: What /proc/cpuinfo calls the parts of a processor's identity, on x86-64 and on aarch64.
_IDENTITY = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")

#: What caps the levels of torch's libraries below the processor's; ATEN_CPU_CAPABILITY shows in torch's own capability.
_CAPS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR")


def class_name(dtype: str, kinds: Iterable[str]) -> str:
    """Return, for instance, ``bfloat16/ordered-2``; several kinds, for unlike parts of a model, are joined by +."""
    return f"{dtype}/{'+'.join(sorted(set(kinds)))}"


def torch_kind(device: torch.device, *, deterministic: bool) -> str:
    """What torch's own operators compute with: its libraries sum by the processor, or device, and their version.

    ``deterministic`` sums do not depend on the batch; others of one kind may differ by a rounding even on one machine.
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
    """What the system says of the first core; empty if it says nothing."""
    try:
        first, _, _ = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}
