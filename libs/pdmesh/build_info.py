"""Facts about how the running code was built."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec


def core_build() -> str:
    """Return whether the imported scheduling core is compiled or Python, in words."""
    spec = find_spec("pdmesh.core.scheduler")
    is_python = spec is None or spec.origin is None or spec.origin.endswith(".py")
    return "Python" if is_python else "compiled by mypyc"


def version() -> str:
    """Return the version of the installed pdmesh."""
    return metadata.version("pdmesh")
