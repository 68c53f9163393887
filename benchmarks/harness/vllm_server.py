"""vLLM's server and a mesh of ours, each started on a checkpoint for the same client."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx

from pdmesh.cli.processes import ending_with_us
from pdmesh_testing.mesh import running_mesh

#: Settings of vLLM's threads that are plausible on any machine. By default, a core of few is left to its other process.
BIND = "VLLM_CPU_OMP_THREADS_BIND"
THREADS: Mapping[str, Mapping[str, str]] = {
    f"its default {BIND}": {},
    f"{BIND}=0-{(os.cpu_count() or 1) - 1}": {BIND: f"0-{(os.cpu_count() or 1) - 1}"},
}

OWN_ENVIRONMENT = ("PYTHONPATH", "OMP_NUM_THREADS", "MKL_NUM_THREADS")

START_TIMEOUT_S = 300.0


def foreign_environment() -> dict[str, str]:
    """Ours, less what leads to our own packages, and says how many threads our own processes have."""
    return {key: value for key, value in os.environ.items() if key not in OWN_ENVIRONMENT}


def best_threads(rate: Callable[[str], float], unit: str) -> str:
    """Measure vLLM once with each of `THREADS`, print the rates, and return the setting with the highest."""
    rates = {threads: rate(threads) for threads in THREADS}
    best = max(rates, key=rates.__getitem__)
    print("vLLM: " + ", ".join(f"{each:.4g} {unit} with {name}" for name, each in rates.items()) + f"; taken: {best}")
    return best


@contextmanager
def running_vllm(vllm: Path, checkpoint: Path, threads: str, *, dtype: str = "bfloat16") -> Generator[str]:
    """Its base URL, once it serves with one of `THREADS`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    base_url = f"http://127.0.0.1:{port}"
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--dtype", dtype]
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(
            ending_with_us([str(vllm), "serve", str(checkpoint), *arguments]),
            env={"VLLM_CPU_KVCACHE_SPACE": "2", **foreign_environment(), **THREADS[threads]},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            wait_until_healthy(server, base_url)
            yield base_url
        except TimeoutError as error:
            log.seek(0)
            raise RuntimeError(f"vLLM does not serve:\n{log.read()[-4000:].decode(errors='replace')}") from error
        finally:
            server.terminate()
            server.wait(60)


def wait_until_healthy(server: subprocess.Popen[bytes], base_url: str) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while server.poll() is None and time.monotonic() < deadline_s:
        try:
            if httpx.get(f"{base_url}/health").is_success:
                return
        except httpx.TransportError:
            pass  # it does not listen yet
        time.sleep(0.5)
    raise TimeoutError


@contextmanager
def running_pdmesh(checkpoint: Path, settings: Mapping[str, str] | None = None, **pools: int) -> Generator[str]:
    """Start a mesh of ours. ``settings`` and ``pools`` are as in `running_mesh`."""
    with (
        tempfile.TemporaryDirectory() as folder,
        running_mesh(Path(folder), model=checkpoint, settings=settings, **pools) as mesh,
    ):
        yield mesh.base_url
