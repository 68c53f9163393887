"""The ``pdmesh`` command. Importing it, and ``--help``, load neither torch nor gRPC."""

from __future__ import annotations

import io
import os
import sys

from pdmesh.errors import ConfigError, PdmeshError
from pdmesh.failures import sentence


def main() -> int:
    """Run the command line; the exit code is 0 done, 1 failed, 2 wrong usage or configuration."""
    _mend_standard_streams()
    import typer

    from pdmesh.cli.app import app

    try:
        return int(app(prog_name="pdmesh", standalone_mode=False) or 0)
    except typer.TyperException as error:
        command = getattr(getattr(error, "ctx", None), "command_path", "pdmesh")
        message = " ".join(error.format_message().split()).rstrip(".")
        sys.stderr.write(f"pdmesh: {message[0].lower()}{message[1:]}; see `{command} --help`\n")
        return 2
    except (typer.Abort, KeyboardInterrupt):
        sys.stderr.write("\n")
        return 130
    except ConfigError as error:
        sys.stderr.write(f"pdmesh: {error}\n")
        return 2
    except PdmeshError as error:
        sys.stderr.write(f"pdmesh: {error}\n")
        return int(getattr(error, "exit_code", 1))
    except (OSError, MemoryError) as error:  # of the machine; any other would be a bug, whose traceback is wanted
        sys.stderr.write(f"pdmesh: {sentence(error)}\n")
        return 1


def _mend_standard_streams() -> None:
    """Open those that are closed, so that no file or pipe of ours gets their numbers; replace what cannot be shown."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # with LANG=C, say, not every character can be shown
