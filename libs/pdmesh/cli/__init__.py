"""The ``pdmesh`` command. Importing it, and ``--help``, load neither torch nor gRPC."""

from __future__ import annotations

import io
import os
import sys

from pdmesh.errors import ConfigError, PdmeshError
from pdmesh.failures import sentence


def main() -> int:
    """Run the command line and return the exit code: 0 done, 1 failed, 2 wrong usage or configuration."""
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
    except (OSError, MemoryError) as error:  # faults of the machine; others are bugs with a traceback
        sys.stderr.write(f"pdmesh: {sentence(error)}\n")
        return 1


def _mend_standard_streams() -> None:
    """Open closed standard streams, so that no file gets their descriptors; replace characters they cannot show."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # LANG=C, for example, cannot show every character
