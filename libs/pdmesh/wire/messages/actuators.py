"""What whoever starts and stops processes, the *actuator*, and the scheduler tell each other (``Admin``)."""

from __future__ import annotations

from typing import Annotated

import msgspec

from pdmesh.model import InstanceId, PoolMember
from pdmesh.ranges import ANY_COUNT
from pdmesh.wire.messages.envelope import Message

#: Longer, a question is asked again.
MAX_WAIT_S = 4.0


class ServiceProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process that an actuator looks after. Instances go by their ids, as ``pdmesh status`` lists them."""

    name: str
    pid: int


class FailedStart(msgspec.Struct, frozen=True, kw_only=True):
    """An instance that is wanted and could not be started."""

    instance_id: InstanceId
    reason: str


class FollowPools(Message, frozen=True, kw_only=True):
    """An actuator's question, asked again and again: answered by `PoolsWanted` once that has another ``revision``, or
    after ``wait_s``.
    """

    actuator_id: str  # there is one at a time
    services: tuple[ServiceProcess, ...]  # all that it keeps running
    unsettled: tuple[InstanceId, ...] = ()  # besides: their processes are being started, or end
    available_bytes: Annotated[int, ANY_COUNT]  # of the host's memory
    name_prefix: str = ""  # of the ids of instances
    failed: tuple[FailedStart, ...] = ()
    revision: int  # of the last answer
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT_S)]


class PoolsWanted(Message, frozen=True, kw_only=True):
    """What an actuator has to do, unless it is done already."""

    revision: int
    start: tuple[PoolMember, ...]
    stop: tuple[InstanceId, ...]  # nothing is left on them
    replace: tuple[ServiceProcess, ...]  # by other processes, without a gap where that can be
