"""The ``pdmesh`` command in the test's own process: to start another takes half a second of CPU time."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

from pdmesh.cli import main


def pdmesh_here(*arguments: str | Path, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``pdmesh ARGUMENTS`` in this process; return exit code and output. ``environ`` replaces the environment."""
    command = ["pdmesh", *map(str, arguments)]
    output, errors = io.StringIO(), io.StringIO()
    with (
        patch.dict(os.environ, os.environ if environ is None else environ, clear=True),
        redirect_stdout(output),
        redirect_stderr(errors),
        patch.object(sys, "argv", command),
    ):
        try:
            code: object = main()
        except SystemExit as ended:
            code = ended.code
    return subprocess.CompletedProcess(command, int(str(code or 0)), output.getvalue(), errors.getvalue())
