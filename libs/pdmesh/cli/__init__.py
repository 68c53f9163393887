"""The ``pdmesh`` command. Importing it, and ``--help``, load neither torch nor gRPC."""

from __future__ import annotations

import io
import sys

from pdmesh.errors import ConfigError, PdmeshError
from pdmesh.failures import sentence


def main() -> int:
    """Run the command line; the exit code is 0 done, 1 failed, 2 wrong usage or configuration."""
    from pdmesh.cli.app import app

    for stream in (sys.stdout, sys.stderr):  # None where they are closed
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # with LANG=C, say, not every character can be shown
    try:
        app()
    except ConfigError as error:
        sys.stderr.write(f"pdmesh: {error}\n")
        return 2
    except PdmeshError as error:
        sys.stderr.write(f"pdmesh: {error}\n")
        return int(getattr(error, "exit_code", 1))
    except (OSError, MemoryError) as error:  # of the machine; any other would be a bug, whose traceback is wanted
        sys.stderr.write(f"pdmesh: {sentence(error)}\n")
        return 1
    return 0
