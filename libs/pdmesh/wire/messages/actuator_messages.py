"""What whoever starts and stops processes, an *actuator*, and the scheduler tell each other (``Admin``)."""

from __future__ import annotations

from typing import Annotated

import msgspec

from pdmesh.core.commands import DesiredProcesses
from pdmesh.core.operator_events import ActuatorReported
from pdmesh.wire.messages.envelope import Message

#: Longer, a question is asked again.
MAX_WAIT_S = 4.0


class FollowPools(Message, frozen=True, kw_only=True):
    """An actuator's question, asked again and again: answered by `PoolsDesired` once that has another ``revision``, or
    after ``wait_s``.
    """

    report: ActuatorReported
    revision: int  # of the last answer
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT_S)]


class PoolsDesired(Message, frozen=True, kw_only=True):
    """What an actuator has to do, unless it is done already."""

    revision: int
    processes: DesiredProcesses
