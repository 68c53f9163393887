"""Line of a request's record about an event or a command (`pdmesh requests show`)."""

from __future__ import annotations

from typing import NamedTuple

from pdmesh.model import InstanceId


class RecordLine(NamedTuple):
    """A line of a request's record: what happened, then details, the instance, and the figures."""

    what: str
    detail: str = ""
    instance_id: InstanceId | None = None
    figures: dict[str, float] | None = None


def ms(seconds: float) -> str:
    """Return a time in milliseconds as text."""
    return f"{seconds * 1e3:.1f} ms"


def over(carrier: str) -> str:
    """Return the end of a line on moved KV: what carried the KV, if this is known."""
    return f", over {carrier}" if carrier else ""
