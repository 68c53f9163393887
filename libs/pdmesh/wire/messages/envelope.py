"""What all messages between our services are, and the envelope of the core's own words."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar, get_args

import msgspec

from pdmesh.errors import ProtocolError
from pdmesh.wire.messages.generation import Prompt

if TYPE_CHECKING:  # imported late: commands that ask a scheduler need no event
    from pdmesh.core.commands import GatewayCommand, InstanceCommand
    from pdmesh.core.events import GatewayEvent, InstanceEvent

#: Bumped when a peer of the last version could misread us. Checked at registration.
PROTOCOL_VERSION = 16


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of all messages; the tag is the class name."""


class StandingBy(Message, frozen=True, kw_only=True):
    """Said instead of a welcome, or an answer, by a scheduler that does not lead."""

    leader: str  # its address; empty: nobody leads, and it may be this one soon


class EventMessage(Message, frozen=True, kw_only=True):
    """An event for the scheduling core as whoever raises it says it: its name and its fields.

    The event log has events in the same form. A new event needs no message of its own.
    """

    name: str
    fields: msgspec.Raw

    @classmethod
    def of(cls, event: InstanceEvent | GatewayEvent) -> EventMessage:
        return cls(name=type(event).__name__, fields=msgspec.Raw(msgspec.msgpack.encode(event)))

    @property
    def event(self) -> InstanceEvent:
        """What an instance says. Raises ProtocolError if it is nothing that an instance may."""
        return _decoded(_instance_events(), self.name, self.fields)

    @property
    def gateway_event(self) -> GatewayEvent:
        """What a gateway says. Raises ProtocolError if it is nothing that a gateway may."""
        return _decoded(_gateway_events(), self.name, self.fields)


class CommandMessage(Message, frozen=True, kw_only=True):
    """A command as the scheduling core made it, in the form of `EventMessage`.

    ``prompt`` comes with the commands that name a request to an instance for the first time: an `AdmitPrefill`, and the
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
        """Raises ProtocolError if it is none for an instance."""
        return _decoded(_instance_commands(), self.name, self.fields)

    @property
    def gateway_command(self) -> GatewayCommand:
        """Raises ProtocolError if it is none for a gateway."""
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
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: text that is no UTF-8
        raise ProtocolError(f"malformed {name}: {error}") from error
