"""Other engines beside ours: each in a process of its own, with the python of a venv that has it.

A script of ``native`` reads its cases, one line of JSON, and answers with a line that names the engine. Each further
line asks for a round; it answers with the seconds of each case, as JSON. So rounds of several engines go in turn.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.report import unavailable

_NATIVE = Path(__file__).parent / "native"


class Peer:
    """An engine that is asked for rounds. `close` ends the process."""

    def __init__(self, venv: str, script: str, cases: Mapping[str, Any], arguments: Sequence[str] = ()) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `close`
        self._process = subprocess.Popen(
            [f"{venv}/bin/python", str(_NATIVE / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.name = self._ask(cases)

    def measure(self) -> Mapping[str, float]:
        """Measure each case once; seconds by its name."""
        answer: Mapping[str, float] = self._ask("round")
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def _ask(self, what: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # what it said last tells why
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            unavailable("a peer ended: " + (self._log.read().strip().splitlines() or ["it said nothing"])[-1])
        return json.loads(line)
