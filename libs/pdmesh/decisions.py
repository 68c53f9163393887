"""The scheduler's latest decisions, kept in memory for `pdmesh pool advise`: bounded in time and in number."""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, get_args

import msgspec

from pdmesh.core.commands import Command, SetRole, WakeAt
from pdmesh.core.events import (
    CacheReported,
    Event,
    InstanceJoined,
    InstanceLost,
    KvReleased,
    LoadReported,
    RequestArrived,
    Tick,
)
from pdmesh.core.operator_events import BundleChangeRequested
from pdmesh.errors import ProtocolError
from pdmesh.model import NO_USES, InstanceId, InstanceProfile, Role
from pdmesh.operations import PoolCounts
from pdmesh.plans import NO_EVICTIONS

#: Seconds for which decisions are kept.
RECENT_S = 600.0

#: Largest number of decisions, and approximate limit of bytes, in one page.
PAGE_DECISIONS = 500
PAGE_BYTES = 1 << 20

#: Events without interest for advice. Only the commands that answer them are kept.
_PLAIN = (Tick, LoadReported, CacheReported)

#: Fields of commands that hold hashes of prompts.
_HASHES: Mapping[str, object] = {"chain": (), "room": NO_EVICTIONS}

#: Fields with hashes of prompts, for each kind of command that has any.
_HASHES_OF = {
    kind: names for kind in get_args(Command) if (names := tuple(_HASHES.keys() & set(kind.__struct_fields__)))
}


class Decision(NamedTuple):
    """An event, and the core's commands in answer."""

    now_s: float
    event: Event
    commands: Sequence[Command]


@dataclass(slots=True)
class MeshMembers:
    """The instances and the bundle of a mesh, after the decisions that were applied."""

    bundle: str
    profiles: dict[InstanceId, InstanceProfile] = field(default_factory=dict[InstanceId, InstanceProfile])

    def apply(self, decision: Decision) -> None:
        """Apply joins, losses, role changes and bundle changes of a decision."""
        match decision.event:
            case InstanceJoined(profile=profile):
                self.profiles[profile.instance_id] = profile
            case InstanceLost(instance_id=instance_id):
                self.profiles.pop(instance_id, None)
            case BundleChangeRequested(bundle=bundle):
                self.bundle = bundle
            case _:
                pass
        for command in decision.commands:
            if isinstance(command, SetRole) and (there := self.profiles.get(command.instance_id)):
                self.profiles[command.instance_id] = replace(there, role=command.role)

    @property
    def pools(self) -> PoolCounts:
        """Number of instances of each role."""
        counts = Counter(profile.role for profile in self.profiles.values())
        return PoolCounts(prefill=counts[Role.PREFILL], decode=counts[Role.DECODE], mixed=counts[Role.MIXED])


class RecentDecisions:
    """The decisions of the last `RECENT_S` seconds, at most ``max_decisions`` of them."""

    def __init__(self, bundle: str, max_decisions: int) -> None:
        self._max_decisions = max_decisions
        self._kept: deque[Decision] = deque()
        self._first = 0  # number of the oldest kept decision
        self._before = MeshMembers(bundle)

    def record(self, now_s: float, event: Event, commands: Sequence[Command]) -> None:
        """Keep a decision, without the hashes of prompts, which may be large. Drop the oldest beyond the limits.

        A tick or a report of load or cache is kept as a `Tick`, and only if commands answer it.
        """
        commands = [_without_hashes(command) for command in commands if not isinstance(command, WakeAt)]
        if isinstance(event, _PLAIN):
            if not commands:
                return
            event = Tick()
        elif isinstance(event, RequestArrived):
            event = replace(event, request=replace(event.request, prefix=()))
        elif isinstance(event, InstanceJoined):
            residents = tuple(replace(resident, granules=()) for resident in event.residents)
            event = replace(event, residents=residents, kept=(), jumps=(), offloaded=(), uses=NO_USES)
        elif isinstance(event, KvReleased) and event.granules:
            event = replace(event, granules=())
        self._kept.append(Decision(now_s, event, commands))
        while self._kept and (len(self._kept) > self._max_decisions or self._kept[0].now_s < now_s - RECENT_S):
            self._before.apply(self._kept.popleft())
            self._first += 1

    @property
    def before(self) -> MeshMembers:
        """The mesh before the oldest kept decision."""
        return self._before

    def page(self, start: int) -> tuple[list[bytes], int | None]:
        """Return encoded decisions from number ``start`` on, and the next page's start; None after the last page."""
        number = max(start, self._first)
        encoded: list[bytes] = []
        num_bytes = 0
        while number - self._first < len(self._kept) and len(encoded) < PAGE_DECISIONS and num_bytes < PAGE_BYTES:
            encoded.append(encode_decision(self._kept[number - self._first]))
            num_bytes += len(encoded[-1])
            number += 1
        return encoded, number if number - self._first < len(self._kept) else None


def _without_hashes(command: Command) -> Command:
    names = [name for name in _HASHES_OF.get(type(command), ()) if getattr(command, name) != _HASHES[name]]
    return msgspec.structs.replace(command, **{name: _HASHES[name] for name in names}) if names else command


def encode_decision(decision: Decision) -> bytes:
    """Return a decision as msgpack: time, event and commands, the last two with their type names."""
    named = [(type(each).__name__, each) for each in (decision.event, *decision.commands)]
    return msgspec.msgpack.encode((decision.now_s, named))


def decode_decision(data: bytes) -> Decision:
    """Return the decision that `encode_decision` encoded. Raise ProtocolError if it is malformed."""
    kinds = _kinds()
    try:
        now_s, named = msgspec.msgpack.decode(data, type=tuple[float, list[tuple[str, msgspec.Raw]]])
        event, *commands = (msgspec.msgpack.decode(fields, type=kinds[name]) for name, fields in named)
    except (msgspec.MsgspecError, ValueError, KeyError) as error:
        raise ProtocolError(f"the scheduler sent a malformed decision: {error}") from error
    return Decision(now_s, event, commands)


@functools.cache
def _kinds() -> Mapping[str, Any]:
    return {kind.__name__: kind for kind in (*get_args(Event), *get_args(Command))}
