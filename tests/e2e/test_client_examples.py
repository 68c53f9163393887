"""The scripts of ``examples/clients``, unmodified, against a mesh with the demo model.

``tests/clients.sh FOLDER`` installs the libraries that the tests have not anyway; where they are not on the path, what
needs them is skipped.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from pdmesh_testing.mesh import RunningMesh, running_mesh

pytestmark = [pytest.mark.e2e, pytest.mark.ucx, pytest.mark.slow]

CLIENTS = Path(__file__).parents[2] / "examples/clients"


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningMesh]:
    with running_mesh(tmp_path_factory.mktemp("mesh"), model=None) as mesh:
        yield mesh


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("script", "python", "shows"),
    [
        ("openai_chat", sys.executable, ""),
        ("openai_responses", sys.executable, "typed: name="),
        ("anthropic_messages", sys.executable, "answers:"),
        ("instructor_models", "python-of-older-clients", "JSON_SCHEMA name="),
        ("langchain_agent", "python-of-clients", "function_calling name="),
        ("litellm_chat", "python-of-clients", "get_weather"),
        ("openai_agents", "python-of-clients", "streamed:"),
        ("pydantic_ai_agent", "python-of-clients", "size="),
        ("smolagents_model", "python-of-clients", "get_weather"),
        ("llama_index_llm", "python-of-older-clients", "get_weather"),
    ],
)
def test_a_client_runs_through(mesh: RunningMesh, script: str, python: str, shows: str) -> None:
    if (found := shutil.which(python)) is None:
        pytest.skip(f"{python} is not on the path (tests/clients.sh puts it into a folder)")
    done = subprocess.run(
        [found, str(CLIENTS / f"{script}.py")],
        env={**os.environ, "PDMESH_URL": f"http://{mesh.record.http_address}"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert shows in done.stdout
