"""The launcher that end-to-end tests and benchmarks share leaves nothing behind, however they end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pdmesh.cli.process_id import process_id, wait_for_end
from pdmesh_testing.examples import slow_beyond

pytestmark = pytest.mark.e2e

PROGRAM = """
import json, sys, time
from pathlib import Path
from pdmesh_testing.mesh import running_mesh

with running_mesh(Path(sys.argv[1]), model=None, settings={"WORKER_ENGINE": "fake"}) as mesh:
    print(json.dumps([mesh.record.supervisor.pid, *mesh.pids().values()]), flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", slow_beyond(0, [signal.SIGKILL, signal.SIGTERM]))
def test_a_killed_benchmark_takes_its_mesh_along(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout is not None
        processes = [process_id(pid) for pid in json.loads(benchmark.stdout.readline())]
        benchmark.send_signal(number)
    assert len(processes) == 5
    assert all(process is not None and wait_for_end(process, 30) for process in processes)
