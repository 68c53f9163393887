"""The base of all messages between services, and the envelopes of the core's events and commands."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar, get_args

import msgspec

from pdmesh.errors import ProtocolError
from pdmesh.wire.messages.generation import Prompt

if TYPE_CHECKING:
    from pdmesh.core.commands import GatewayCommand, InstanceCommand
    from pdmesh.core.events import GatewayEvent, InstanceEvent

#: Raised when a peer of the last version could misread a message. Checked at registration.
PROTOCOL_VERSION = 17


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of all messages; the tag is the class name."""


class StandingBy(Message, frozen=True, kw_only=True):
    """The answer of a scheduler that does not lead, instead of a welcome or another answer.

    ``leader`` is the leader's address. If it is empty, no scheduler leads, and this one may lead soon.
    """

    leader: str


class EventMessage(Message, frozen=True, kw_only=True):
    """An event for the scheduling core, as its sender raised it: the name and fields of the event's class.

    The event log has events in the same form. A new event needs no message of its own.
    """

    name: str
    fields: msgspec.Raw

    @classmethod
    def of(cls, event: InstanceEvent | GatewayEvent) -> EventMessage:
        return cls(name=type(event).__name__, fields=msgspec.Raw(msgspec.msgpack.encode(event)))

    @property
    def event(self) -> InstanceEvent:
        """The instance event. Raises ProtocolError if it is none."""
        return _decoded(_instance_events(), self.name, self.fields)

    @property
    def gateway_event(self) -> GatewayEvent:
        """The gateway event. Raises ProtocolError if it is none."""
        return _decoded(_gateway_events(), self.name, self.fields)


class CommandMessage(Message, frozen=True, kw_only=True):
    """A command as the scheduling core made it, in the form of `EventMessage`.

    ``prompt`` is set for commands that name a request to an instance for the first time: `AdmitPrefill`, and the
    `ExpectCopy` of a hand-over.
    """

    name: str
    fields: msgspec.Raw
    prompt: Prompt | None = None

    @classmethod
    def of(cls, command: InstanceCommand | GatewayCommand, prompt: Prompt | None = None) -> CommandMessage:
        fields = msgspec.Raw(msgspec.msgpack.encode(command))
        return cls(name=type(command).__name__, fields=fields, prompt=prompt)

    @property
    def command(self) -> InstanceCommand:
        """The command to an instance. Raises ProtocolError if it is none."""
        return _decoded(_instance_commands(), self.name, self.fields)

    @property
    def gateway_command(self) -> GatewayCommand:
        """The command to a gateway. Raises ProtocolError if it is none."""
        return _decoded(_gateway_commands(), self.name, self.fields)


@functools.cache
def _instance_events() -> Mapping[str, msgspec.msgpack.Decoder[InstanceEvent]]:
    from pdmesh.core.events import InstanceEvent

    return {kind.__name__: msgspec.msgpack.Decoder(kind) for kind in get_args(InstanceEvent)}


@functools.cache
def _gateway_events() -> Mapping[str, msgspec.msgpack.Decoder[GatewayEvent]]:
    from pdmesh.core.events import GatewayEvent

    return {GatewayEvent.__name__: msgspec.msgpack.Decoder(GatewayEvent)}


@functools.cache
def _instance_commands() -> Mapping[str, msgspec.msgpack.Decoder[InstanceCommand]]:
    from pdmesh.core.commands import InstanceCommand

    return {kind.__name__: msgspec.msgpack.Decoder(kind) for kind in get_args(InstanceCommand)}


@functools.cache
def _gateway_commands() -> Mapping[str, msgspec.msgpack.Decoder[GatewayCommand]]:
    from pdmesh.core.commands import GatewayCommand

    return {kind.__name__: msgspec.msgpack.Decoder(kind) for kind in get_args(GatewayCommand)}


SaidT = TypeVar("SaidT")


def _decoded(decoders: Mapping[str, msgspec.msgpack.Decoder[SaidT]], name: str, fields: msgspec.Raw) -> SaidT:
    decoder = decoders.get(name)
    if decoder is None:
        raise ProtocolError(f"unknown message type {name!r}")
    try:
        return decoder.decode(fields)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: invalid UTF-8
        raise ProtocolError(f"malformed {name}: {error}") from error
