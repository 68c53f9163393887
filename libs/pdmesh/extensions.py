"""Parts of pdmesh in other distributions, each named by an entry point and imported when it is loaded."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from pdmesh.errors import ConfigError


def extension(group: str, name: str, *, wanted: str, install: str) -> EntryPoint:
    """Return the entry point ``name`` of ``group``.

    Raises ConfigError if no installed distribution has one. The message says that ``wanted`` is not installed, and that
    ``install`` has it.
    """
    for entry in entry_points(group=group, name=name):
        return entry
    raise ConfigError(f"{wanted} is not installed: run `pip install '{install}'`")
