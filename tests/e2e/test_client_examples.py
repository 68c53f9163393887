"""The scripts of ``examples/clients`` whose libraries the tests have anyway, against a mesh with the demo model."""

import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from pdmesh.testing.mesh import RunningMesh, running_mesh

pytestmark = [pytest.mark.e2e, pytest.mark.ucx, pytest.mark.slow]

CLIENTS = Path(__file__).parents[2] / "examples/clients"


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningMesh]:
    with running_mesh(tmp_path_factory.mktemp("mesh"), model=None) as mesh:
        yield mesh


@pytest.mark.parametrize(
    ("script", "shows"),
    [("openai_chat", ""), ("openai_responses", "typed: name="), ("anthropic_messages", "answers:")],
)
def test_a_client_runs_through(mesh: RunningMesh, script: str, shows: str) -> None:
    done = subprocess.run(
        [sys.executable, str(CLIENTS / f"{script}.py")],
        env={**os.environ, "PDMESH_URL": f"http://{mesh.record.http_address}"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert shows in done.stdout
