"""AIPerf's AgentX scenario, unmodified, with drawn agent sessions, as docs/clients.md shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Variables that lead AIPerf to our packages, or keep it from reading a folder as tokenizer.
_OWN_VARIABLES = ("HF_HUB_OFFLINE", "PYTHONPATH")

#: Time of a run beyond its duration, in which AIPerf starts, reads the sessions and waits for the last answers.
_BESIDE_S = 680.0


@dataclass(frozen=True, slots=True)
class AgentXRun:
    """What AIPerf printed, and the fields of its ``profile_export_aiperf.json``."""

    output: str
    figures: Mapping[str, Any]

    def figure(self, name: str, statistic: str) -> float:
        """Return a statistic of a metric, such as ``time_to_first_token`` and ``p90``."""
        return float(self.figures[name][statistic])


def run_agentx(
    aiperf: Path, folder: Path, base_url: str, name: str, model: Path, *, num_agents: int, seconds: int
) -> AgentXRun:
    """Play sessions with lengths / 32, `num_agents` at a time, for as long as ``seconds``.

    Each number of agents has sessions of its own. ``folder`` must not exist. ``name`` is the served model's, and
    ``model`` its folder. Raises RuntimeError with AIPerf's output if it fails.
    """
    sessions, out = folder / "sessions", folder / "out"
    draw = ["--sessions", str(max(6, num_agents + 4)), "--scale", "32", "--seed", str(num_agents)]
    subprocess.run([sys.executable, "-m", "pdmesh_lab.weka_generator", str(sessions), *draw], check=True)
    done = subprocess.run(
        [
            *(str(aiperf), "profile", "--scenario", "inferencex-agentx-mvp", "--unsafe-override", "--streaming"),
            *("--url", base_url, "--model", name, "--endpoint-type", "chat", "--tokenizer", str(model)),
            *("--custom-dataset-type", "weka_trace", "--input-file", str(sessions), "--use-server-token-count"),
            *("--concurrency", str(num_agents), "--benchmark-duration", str(seconds), "--random-seed", "7"),
            *("--workers-max", "1", "--record-processors", "1", "--ui-type", "none", "--no-gpu-telemetry"),
            *("--output-artifact-dir", str(out)),
        ],
        env={name: value for name, value in os.environ.items() if name not in _OWN_VARIABLES},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds + _BESIDE_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"AIPerf failed:\n{done.stdout[-4000:]}")
    return AgentXRun(done.stdout, json.loads((out / "profile_export_aiperf.json").read_text()))
