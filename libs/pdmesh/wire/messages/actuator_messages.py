"""Messages between the scheduler and an *actuator*, which starts and stops processes (``Admin``)."""

from __future__ import annotations

from typing import Annotated

import msgspec

from pdmesh.core.commands import DesiredProcesses
from pdmesh.core.operator_events import ActuatorReported
from pdmesh.wire.messages.envelope import Message

#: Maximum time that a question waits for its answer. Then it is asked again.
MAX_WAIT_S = 4.0


class FollowPools(Message, frozen=True, kw_only=True):
    """An actuator's repeated question. Answered by `PoolsDesired` once its ``revision`` differs, or after ``wait_s``.

    ``revision`` is the last answer's.
    """

    report: ActuatorReported
    revision: int
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT_S)]


class PoolsDesired(Message, frozen=True, kw_only=True):
    """The processes that an actuator should run."""

    revision: int
    processes: DesiredProcesses
