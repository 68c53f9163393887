"""How long `pdmesh up` takes to refuse a mistake: wall and CPU seconds of a new process for each.

    python benchmarks/refusals.py [--rounds 3]

The best round counts: other work on the machine only makes a round longer. The limit is 3 s of wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import Limits, heading

from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.gguf_files import write_gguf

#: Wall time that a refusal may take, and that a process may.
MOST_S, TIMEOUT_S = 3.0, 120.0


def mistakes(folder: Path) -> dict[str, list[str]]:
    """What is typed behind `pdmesh up`, by what is wrong."""
    model = write_checkpoint(folder / "model")
    write_gguf(model, folder / "cut.gguf", "Q8_0")
    content = (folder / "cut.gguf").read_bytes()
    (folder / "cut.gguf").write_bytes(content[:-100])
    quantised = write_checkpoint(folder / "quantised")
    config = quantised / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {"quant_method": "quip"}}))
    return {
        "device": ["--device", "gpu"],
        "no such device": ["--device", "cuda"],
        "length": [str(model), "--max-model-len", "9000"],
        "bundle": ["--bundle", "pdmsh"],
        "dtype": ["--dtype", "int8"],
        "format": [str(quantised)],
        "damaged file": [str(folder / "cut.gguf")],
        "no such file": ["./nosuch.gguf"],
        "memory": [str(model), "--kv-cache-bytes", str(1 << 50)],
    }


def main() -> None:
    """Print a line for each mistake."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds: int = parser.parse_args().rounds
    print(heading("Refusals of `pdmesh up`"))
    limits = Limits()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environ = {**os.environ, "XDG_STATE_HOME": f"{name}/state", "XDG_CACHE_HOME": f"{name}/cache"}
        for what, arguments in mistakes(folder).items():
            walls, cpus, told = list[float](), list[float](), ""
            for _ in range(rounds):
                before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
                command = [sys.executable, "-m", "pdmesh.cli", "up", "--port", "0", *arguments]
                done = subprocess.run(
                    command, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
                )
                walls.append(time.monotonic() - began_s)
                after = resource.getrusage(resource.RUSAGE_CHILDREN)
                cpus.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
                assert done.returncode == 2, done
                told = done.stderr.strip()
            kept = limits.at_most(what, min(walls), MOST_S)
            print(f"{what:15} {min(walls):5.2f} s ({kept}), CPU {min(cpus):5.2f} s  {told[:90]}")
    limits.end()


if __name__ == "__main__":
    main()
