"""A core that records its events and commands."""

from __future__ import annotations

import random

from pdmesh.core.commands import Command
from pdmesh.core.config import CoreConfig
from pdmesh.core.events import Event
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.decisions import Decision
from pdmesh.policy.bundles import make_bundle


class RememberingCore(SchedulerCore):
    """A core that remembers its decisions, for a simulator or the service's driver."""

    def __init__(self, config: CoreConfig, bundle: str, seed: int) -> None:
        super().__init__(config, make_bundle(bundle, config.policy), random.Random(seed))
        self.decisions: list[Decision] = []

    def handle(self, event: Event, now_s: float) -> list[Command]:
        commands = super().handle(event, now_s)
        self.decisions.append(Decision(now_s, event, tuple(commands)))
        return commands
