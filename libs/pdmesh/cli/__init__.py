"""The ``pdmesh`` command. Importing it, and ``--help``, load neither torch nor gRPC."""

from __future__ import annotations

import sys

from pdmesh.errors import ConfigError, PdmeshError


def main() -> int:
    """Run the command line; the exit code is 0 done, 1 failed, 2 wrong usage or configuration."""
    from pdmesh.cli.app import app

    try:
        app()
    except ConfigError as error:
        sys.stderr.write(f"pdmesh: {error}\n")
        return 2
    except PdmeshError as error:
        sys.stderr.write(f"pdmesh: {error}\n")
        return int(getattr(error, "exit_code", 1))
    return 0
