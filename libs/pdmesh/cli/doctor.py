"""`pdmesh doctor`: the abilities of this machine for a mesh, and remedies for missing ones."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

import typer
from huggingface_hub import constants

from pdmesh.build_info import core_build
from pdmesh.cli.options import Output
from pdmesh.cli.preflight import check_machine
from pdmesh.cli.state_folder import MeshRecord, mesh_at, running_meshes, state_root
from pdmesh.cli.tables import terminal_width, wrapped
from pdmesh.config import MeshConfig, TransferConfig, WorkerConfig
from pdmesh.engine.known_models import KNOWN_MODELS
from pdmesh.engine.levels import choose_kernels, processor_levels
from pdmesh.errors import ConfigError
from pdmesh.host import free_host_bytes, num_usable_cores
from pdmesh.transport.reading import why_unreadable
from pdmesh.transport.seal import seconds_to_seal
from pdmesh.worker.engines import hardware_name

_GIB = 1 << 30
_TOOL_TIMEOUT_S = 30.0
_MIN_OPEN_FILES = 4096
_MIN_DISK_BYTES = 2 * _GIB
#: Number of processes: a scheduler, a gateway, two workers, and `pdmesh up`.
_SMALLEST_MESH = 5
#: Bytes of KV whose encryption is timed.
_MEASURED_BYTES = 1 << 20


class Severity(StrEnum):
    OK = "ok"
    WARNING = "warning"  # a mesh runs, but slower or with less
    FAILURE = "failure"  # no mesh runs


@dataclass(frozen=True, slots=True)
class Check:
    subject: str
    verdict: Severity
    found: str
    advice: str = ""


def run_doctor(config: MeshConfig, output: Output, environ: Mapping[str, str]) -> int:
    """Print all checks; return 1 if something essential fails, else 0."""
    checks = list(all_checks(config, environ))
    if output is Output.JSON:
        typer.echo(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        _print(checks)
    return 1 if any(check.verdict is Severity.FAILURE for check in checks) else 0


def all_checks(config: MeshConfig, environ: Mapping[str, str]) -> Iterator[Check]:
    yield check_python()
    yield from check_torch()
    yield from check_processor(config.worker)
    yield from check_ucx(environ)
    yield check_memory_reading(why_unreadable())
    yield check_encryption(config.transfer, seconds_to_seal)
    yield check_port(config.gateway.host, config.gateway.port, running_meshes(environ))
    yield check_memory(config, free_host_bytes())
    yield check_disk("state", state_root(environ), "XDG_STATE_HOME")
    yield check_disk("checkpoints", Path(constants.HF_HUB_CACHE), "HF_HUB_CACHE")
    yield check_open_files()
    yield check_start(config)
    yield check_hub()


def check_python() -> Check:
    return Check("python", Severity.OK, f"{platform.python_version()} at {sys.executable}; core: {core_build()}")


def check_torch() -> Iterator[Check]:
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Check("torch", Severity.FAILURE, f"cannot be imported: {error}", "run `make up`, or pip install torch")
        return
    cores = num_usable_cores()
    yield Check("torch", Severity.OK, f"{torch.__version__}, {torch.get_num_threads()} threads, {cores} cores")
    if not torch.cuda.is_available():
        built = "this build of torch has no CUDA" if torch.version.cuda is None else "no device is visible"
        has_driver = shutil.which("nvidia-smi") is not None
        advice = "install a CUDA build of torch, or check CUDA_VISIBLE_DEVICES" if has_driver else ""
        yield Check("gpu", Severity.WARNING if has_driver else Severity.OK, f"none ({built}): the CPU computes", advice)
        return
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        yield Check("gpu", Severity.OK, f"{index}: {device.name}, {device.total_memory / _GIB:.0f} GiB")


def check_processor(worker: WorkerConfig) -> Iterator[Check]:
    """Yield the abilities of the processor, and the kernels that compute on it for each dtype."""
    name, levels = hardware_name("cpu"), processor_levels()
    yield Check("processor", Severity.OK, f"{name}: {', '.join(levels)}" if levels else name)
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if not levels:
        advice = (
            f"{compiler} is installed: install pdmesh again to compile them"
            if compiler
            else "install a C++ compiler (such as g++), then install pdmesh again to compile them"
        )
        found = "none were compiled when pdmesh was installed: torch computes instead, and bf16 and float16 are slow"
        yield Check("kernels", Severity.WARNING, found, advice)
        return
    for dtype in ("bfloat16", "float16"):
        yield check_kernels(dtype, worker.cpu_level)


def check_kernels(dtype: str, cpu_level: str) -> Check:
    subject = f"{dtype} kernels"
    try:
        choice = choose_kernels(dtype, cpu_level=cpu_level)
    except ConfigError as error:
        return Check(subject, Severity.FAILURE, str(error), "unset PDMESH_WORKER_CPU_LEVEL")
    if choice.library is None:
        return Check(subject, Severity.WARNING, f"torch computes: {choice.reason}", "install pdmesh again")
    return Check(subject, Severity.OK, f"{choice.library.level}: {choice.reason}")


def check_ucx(environ: Mapping[str, str]) -> Iterator[Check]:
    try:
        version = importlib.metadata.version("ucxx-cu13")
        subprocess.run([sys.executable, "-c", "import ucxx"], check=True, capture_output=True, timeout=_TOOL_TIMEOUT_S)
    except importlib.metadata.PackageNotFoundError:
        found = "not installed: KV stays inside this host, which is all that `pdmesh up` needs"
        yield Check("ucx", Severity.WARNING, found, "for instances on several hosts: pip install 'pdmesh[ucx]'")
        return
    except (subprocess.SubprocessError, OSError) as error:
        yield Check(
            "ucx", Severity.FAILURE, f"ucxx cannot be imported: {error}", "run `python -c 'import ucxx'` to see"
        )
        return
    yield Check("ucx", Severity.OK, f"ucxx {version}")
    yield check_transports(_ucx_info, environ.get("UCX_TLS"))


def check_transports(ucx_info: Callable[[], str], ucx_tls: str | None) -> Check:
    """Check that UCX has a network transport for messages. Every machine has ``tcp``."""
    try:
        found = sorted(set(re.findall(r"#\s+Transport:\s*(\S+)", ucx_info())) - {"self"})
    except (OSError, subprocess.SubprocessError) as error:
        return Check("ucx transports", Severity.WARNING, f"ucx_info does not run: {error}", "")
    named = ", ".join(found) + (f"; UCX_TLS={ucx_tls}" if ucx_tls else "")
    if not set(found) - {"cma", "knem", "posix", "sysv", "xpmem"}:
        return Check("ucx transports", Severity.FAILURE, named or "none", "see `ucx_info -d`; unset UCX_TLS")
    return Check("ucx transports", Severity.OK, named)


def _ucx_info() -> str:
    """Return the output of ``ucx_info -d``, a program in UCX's wheel. Raise FileNotFoundError without the wheel."""
    package = importlib.util.find_spec("libucx")
    if package is None or package.origin is None:
        raise FileNotFoundError("the package libucx is not installed")
    root = Path(package.origin).parent
    environment = {**os.environ, "LD_LIBRARY_PATH": str(root / "lib")}
    command = [str(root / "bin" / "ucx_info"), "-d"]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S)
    return done.stdout


def check_memory_reading(unreadable: str | None) -> Check:
    """Report whether processes may read each other's memory; ``unreadable`` says why not."""
    subject = "cross-memory attach"
    if unreadable is None:
        return Check(subject, Severity.OK, "processes may read each other's memory")
    advice = "KV moves over TCP at about 1 GB/s; for faster transfers set ptrace_scope to 1 or allow process_vm_readv"
    return Check(subject, Severity.WARNING, unreadable, advice)


def check_encryption(config: TransferConfig, seconds: Callable[[int], float]) -> Check:
    """Report the cost of `transfer.encrypt` here. ``seconds`` returns the time for a number of bytes on one core."""
    found = f"AES-256-GCM at {_MEASURED_BYTES / seconds(_MEASURED_BYTES) / 1e9:.1f} GB/s on one core"
    return Check("KV encryption", Severity.OK, f"{found}; transfer.encrypt is {'on' if config.encrypt else 'off'}")


def check_port(host: str, port: int, meshes: Sequence[MeshRecord] = ()) -> Check:
    """Check that the port is free, or that one of ``meshes`` serves there."""
    if port == 0:
        return Check("port", Severity.OK, "a free port is used")
    try:
        with socket.create_server((host, port)):
            return Check("port", Severity.OK, f"{host}:{port} is free")
    except OSError as error:
        if (mesh := mesh_at(port, meshes)) is not None:
            return Check("port", Severity.OK, f"mesh {mesh.name!r} serves {mesh.model} at {mesh.http_address}")
        advice = "stop the process that uses it (`pdmesh down` if it is a mesh), or use another with --port"
        return Check("port", Severity.WARNING, f"{host}:{port}: {error.strerror}", advice)


def check_memory(config: MeshConfig, available_bytes: int | None) -> Check:
    """Check ``available_bytes``, within machine and control groups; None if unknown."""
    if available_bytes is None:
        return Check("memory", Severity.OK, "the system does not report how much is available")
    worker = config.worker
    # Two workers, the smallest mesh: their KV caches, and about 600 MiB each for torch itself.
    if worker.kv_cache_bytes is None:
        kv_bytes = int(available_bytes * worker.kv_cache_host_share)
    else:
        kv_bytes = worker.kv_cache_bytes
    wanted_bytes = 2 * (kv_bytes + 600 * (1 << 20))
    found = f"{available_bytes / _GIB:.1f} GiB available, {2 * kv_bytes / _GIB:.1f} GiB of them for two KV caches"
    if available_bytes < wanted_bytes:
        advice = f"one prefill and one decode worker take {wanted_bytes / _GIB:.1f} GiB and twice the weights: "
        return Check("memory", Severity.WARNING, found, advice + "lower --kv-cache-bytes, or use --mixed 1")
    return Check("memory", Severity.OK, found)


def check_disk(what: str, folder: Path, variable: str) -> Check:
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free_bytes = shutil.disk_usage(existing).free
    found = f"{folder}: {free_bytes / _GIB:.1f} GiB free"
    if not os.access(existing, os.W_OK):
        return Check(f"{what} folder", Severity.FAILURE, f"{folder} cannot be written", f"point {variable} elsewhere")
    if free_bytes < _MIN_DISK_BYTES:
        return Check(f"{what} folder", Severity.WARNING, found, "free some space")
    return Check(f"{what} folder", Severity.OK, found)


def check_open_files() -> Check:
    """Check the limit of open files, because a gateway holds two descriptors for each client."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _MIN_OPEN_FILES:
        return Check(
            "open files", Severity.WARNING, f"limit {soft}", f"ulimit -n {_MIN_OPEN_FILES} (hard limit {hard})"
        )
    return Check("open files", Severity.OK, f"limit {soft}")


def check_start(config: MeshConfig) -> Check:
    """Run the checks of `pdmesh up` for the smallest mesh."""
    try:
        check_machine(config, num_processes=_SMALLEST_MESH)
    except ConfigError as error:
        found, _, advice = str(error).partition(": ")
        return Check("limits, loopback", Severity.FAILURE, found, advice)
    return Check("limits, loopback", Severity.OK, "enough for a mesh")


def check_hub() -> Check:
    """Check the hub and its cache, which only hub ids need."""
    cache = Path(constants.HF_HUB_CACHE)
    models = len(list(cache.glob("models--*"))) if cache.is_dir() else 0
    found = f"cache {cache}, {models} models"
    if constants.is_offline_mode():
        return Check("hugging face hub", Severity.OK, f"{found}; offline by HF_HUB_OFFLINE")
    host = constants.ENDPOINT.split("://")[-1].split("/")[0]
    name, _, port = host.partition(":")
    try:
        with socket.create_connection((name, int(port or 443)), timeout=3.0):
            return Check("hugging face hub", Severity.OK, found)
    except OSError:
        advice = (
            f"`pdmesh up FOLDER` or FILE.gguf; {', '.join(KNOWN_MODELS)} still come from the package index, other hub "
            "ids from the cache alone (HF_HUB_OFFLINE=1, HF_ENDPOINT)"
        )
        return Check("hugging face hub", Severity.WARNING, f"{found}; {host} cannot be reached", advice)


def _print(checks: list[Check]) -> None:
    colours = {Severity.OK: "green", Severity.WARNING: "yellow", Severity.FAILURE: "red"}
    width = max(len(check.subject) for check in checks)
    for check in checks:
        verdict = typer.style(f"{check.verdict:7}", fg=colours[check.verdict])
        room = max(terminal_width() - width - 9, 20)
        found = [*wrapped(check.found, room), *(wrapped(f"→ {check.advice}", room) if check.advice else ())]
        typer.echo(f"{verdict} {check.subject:{width}} " + f"\n{'':{width + 9}}".join(found))
