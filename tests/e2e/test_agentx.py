"""AIPerf's AgentX scenario, unmodified, with drawn agent sessions against a mesh. Skipped where `aiperf` is missing."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from pdmesh_testing.agentx import run_agentx
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.mesh import running_mesh

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.timeout(900)
def test_agentx_loses_no_request(tmp_path: Path) -> None:
    if (aiperf := shutil.which("aiperf")) is None:
        pytest.skip("aiperf is not on the path")
    model = write_checkpoint(tmp_path / "model", vocab_size=8192, max_position_embeddings=32768)
    with running_mesh(tmp_path / "mesh", model=model, prefill=0, decode=0, mixed=1) as mesh:
        done = run_agentx(Path(aiperf), tmp_path / "run", mesh.base_url, mesh.model, model, num_agents=2, seconds=120)
        mesh.wait_until_idle()
    violations = {*re.findall(r"Scenario violation [^:]*: (.*?): got", done.output)}
    assert violations == {"--custom-dataset-type / --input-file", "--benchmark-duration"}
    assert "errors=0" in re.findall(r"Phase profiling .* complete \|.*", done.output)[-1]
    assert done.figures["error_summary"] == []
    assert not done.figures["was_cancelled"]
    sent = re.findall(r"Sent (\d+) requests", done.output)[-1]
    assert done.figure("completed_request_count", "avg") == int(sent) > 5
    assert done.figure("overall_usage_prompt_cache_read_pct", "avg") > 50
