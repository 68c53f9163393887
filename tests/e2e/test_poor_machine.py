"""A newcomer's machine that lacks much at once: a mesh starts, answers and ends there."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

LIMIT_S = 120.0

#: More than a mesh needs, less than is usual.
NUM_DESCRIPTORS = 64


def few_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (NUM_DESCRIPTORS, NUM_DESCRIPTORS))


def test_a_mesh_serves_with_few_files_no_home_a_proxy_and_plain_ascii(tmp_path: Path) -> None:
    proxy = "http://127.0.0.1:9"  # nobody is there
    kept = {name: os.environ[name] for name in ("PATH", "HF_HUB_OFFLINE", "OMP_NUM_THREADS") if name in os.environ}
    environ = {
        **kept,
        "HOME": "/proc/nobody",  # cannot be made, by root neither
        "TMPDIR": str(tmp_path),
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONIOENCODING": "ascii",
        "PDMESH_WORKER_ENGINE": "fake",
        "PDMESH_GATEWAY_PORT": "0",
        **dict.fromkeys(("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "grpc_proxy"), proxy),
    }

    def pdmesh(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "pdmesh.cli", *arguments],
            env=environ,
            cwd=tmp_path,
            preexec_fn=few_descriptors,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    started = pdmesh("up", "--detach")
    try:
        assert "computed by stand-in kernels in float32" in started
        assert "--noproxy '*'" in started, "the curl that is printed must work here"
        assert str(tmp_path / f"pdmesh-{os.geteuid()}") in started
        assert pdmesh("chat", "-m", "Hello!").strip()
        assert "compute  stand-in kernels" in pdmesh("status")
    finally:
        pdmesh("down")


def test_a_worker_that_dies_at_start_is_told_on_the_terminal_and_leaves_nothing(tmp_path: Path) -> None:
    """What the checks before the start cannot see: here a KV cache that has no room for one block."""
    done = subprocess.run(
        [sys.executable, "-m", "pdmesh.cli", "up", "--port", "0", "--kv-cache-bytes", "1"],
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path), "PDMESH_WORKER_ENGINE": "fake"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 2
    told = done.stderr.splitlines()
    assert re.match(r"pdmesh: (prefill|decode)-0: worker\.kv_cache_bytes is 1, ", told[0])
    assert "Traceback" not in done.stdout + done.stderr
    assert not list((tmp_path / "pdmesh/default").glob("mesh.json"))
