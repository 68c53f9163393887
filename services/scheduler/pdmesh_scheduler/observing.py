"""The driver's interface to observers of the core: each handled event, with its results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from pdmesh.core.commands import Command
from pdmesh.core.events import Event
from pdmesh.core.requests.request_histories import Milestone
from pdmesh.wire.messages import Generation


class Handled(NamedTuple):
    """An event that the core has handled.

    `now_s` is on the core's clock. `milestones` are the effects of the event and commands on requests. `generation` is
    the prompt of an arriving request. `bundle` is in force after the event. `decision_s` is the core's time for the
    event.
    """

    event: Event
    now_s: float
    commands: Sequence[Command]
    milestones: Sequence[Milestone]
    generation: Generation | None = None
    bundle: str = ""
    decision_s: float = 0.0


class Observer(Protocol):
    """Observer of each handled event, called before the event's commands are carried out. Must not change the core."""

    def observe(self, handled: Handled) -> None: ...
