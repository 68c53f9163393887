"""AIPerf's AgentX scenario, unmodified, with drawn agent sessions against a mesh. Skipped where `aiperf` is missing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.mesh import running_mesh

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.timeout(900)
def test_agentx_loses_no_request(tmp_path: Path) -> None:
    if (aiperf := shutil.which("aiperf")) is None:
        pytest.skip("aiperf is not on the path")
    model = write_checkpoint(tmp_path / "model", vocab_size=8192, max_position_embeddings=32768)
    sessions, out = tmp_path / "sessions", tmp_path / "out"
    draw = [sys.executable, "-m", "pdmesh_lab.weka_generator", str(sessions), "--sessions", "6", "--scale", "32"]
    subprocess.run(draw, check=True)
    with running_mesh(tmp_path / "mesh", model=model, prefill=0, decode=0, mixed=1) as mesh:
        done = subprocess.run(
            [
                *(aiperf, "profile", "--scenario", "inferencex-agentx-mvp", "--unsafe-override", "--streaming"),
                *("--url", mesh.base_url, "--model", mesh.model, "--endpoint-type", "chat", "--tokenizer", str(model)),
                *("--custom-dataset-type", "weka_trace", "--input-file", str(sessions), "--use-server-token-count"),
                *("--concurrency", "2", "--benchmark-duration", "120", "--random-seed", "7"),
                *("--workers-max", "1", "--record-processors", "1", "--ui-type", "none", "--no-gpu-telemetry"),
                *("--output-artifact-dir", str(out)),
            ],
            env={name: value for name, value in os.environ.items() if name not in ("HF_HUB_OFFLINE", "PYTHONPATH")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=800,
            check=False,
        )
        mesh.wait_until_idle()
    assert done.returncode == 0, done.stdout[-4000:]
    violations = {*re.findall(r"Scenario violation [^:]*: (.*?): got", done.stdout)}
    assert violations == {"--custom-dataset-type / --input-file", "--benchmark-duration"}
    assert "errors=0" in re.findall(r"Phase profiling .* complete \|.*", done.stdout)[-1]
    figures = json.loads((out / "profile_export_aiperf.json").read_text())
    assert figures["error_summary"] == []
    assert not figures["was_cancelled"]
    sent = re.findall(r"Sent (\d+) requests", done.stdout)[-1]
    assert figures["completed_request_count"]["avg"] == int(sent) > 5
    assert figures["overall_usage_prompt_cache_read_pct"]["avg"] > 50
