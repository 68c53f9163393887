"""How the code that runs was built."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec


def core_build() -> str:
    """Whether the scheduling core that an import gives is the wheel's compiled one, or Python, in words."""
    spec = find_spec("pdmesh.core.scheduler")
    is_python = spec is None or spec.origin is None or spec.origin.endswith(".py")
    return "Python" if is_python else "compiled by mypyc"


def version() -> str:
    """Return this installation's version of pdmesh."""
    return metadata.version("pdmesh")
