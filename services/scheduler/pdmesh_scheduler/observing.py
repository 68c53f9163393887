"""What the driver tells observers of the core: each event that it handled, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from pdmesh.core.commands import Command
from pdmesh.core.events import Event
from pdmesh.core.requests.lives import Milestone
from pdmesh.wire.messages import Generation


class Handled(NamedTuple):
    """An event that the core has handled."""

    event: Event
    now_s: float  # the core's clock
    commands: Sequence[Command]
    milestones: Sequence[Milestone]  # what both mean for requests
    generation: Generation | None = None  # of an arrival
    bundle: str = ""  # in force afterwards
    decision_s: float = 0.0  # what the core took


class Observer(Protocol):
    """Called with every handled event, before its commands are carried out. An observer changes nothing."""

    def observe(self, handled: Handled) -> None: ...
