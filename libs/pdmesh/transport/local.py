"""Links inside a host: a message names a sender's buffer that holds a piece, and the receiver reads it there.

Each transport listens on a Unix socket with an abstract name. The kernel reports the process at the other end.
Connections of other users are closed. Of this user's processes, only the ones named by the scheduler are accepted, by
their process id. An accepted peer can only send "a piece of n bytes is in my buffer number i", within the buffers that
its data address names; it cannot choose their addresses. When a process dies its socket ends, so its peers notice at
once. The socket bounds the messages that a peer can have sent without being read.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import struct
from collections import OrderedDict
from collections.abc import Callable
from enum import IntEnum

import structlog

from pdmesh.errors import KvTransferError
from pdmesh.transport.address import WorkerAddress
from pdmesh.transport.peers import KnownPeers, Peer
from pdmesh.transport.prefix import HEAD_BYTES
from pdmesh.transport.send_links import Links, Send

log = structlog.get_logger()

NAME_BYTES = 16
#: Messages, each behind its magic: the sender's id; a piece's number, buffer and bytes; a piece's number and verdict.
_HELLO = struct.Struct("<4s8s")
_OFFER = struct.Struct("<4sQIQ")
_ANSWER = struct.Struct("<4sQB")
_HELLO_MAGIC, _OFFER_MAGIC, _ANSWER_MAGIC = b"pdH1", b"pdO2", b"pdA2"
#: Result of SO_PEERCRED: process, user, group.
_CREDENTIALS = struct.Struct("3i")
#: Size of a read, longer than any of these messages.
_LONGEST = 64

#: Maximum number of connections that have not introduced themselves.
MAX_STRANGERS = 64
#: Maximum number of connections that wait to be accepted; the system may allow fewer.
BACKLOG = 1024
#: Pause in accepting connections when no descriptor is left.
FULL_S = 0.5
#: Number of messages or connections that are handled before other tasks get their turn.
MESSAGES_A_TURN = 64


class Verdict(IntEnum):
    """A receiver's answer to the offer of a buffer.

    TAKEN: the buffer may be used again. UNREADABLE: this host does not let the receiver read the buffer.
    """

    TAKEN = 1
    UNREADABLE = 2


class LocalLink:
    """`pdmesh.transport.send_links.Link` to a process of this host and user."""

    def __init__(
        self,
        peer: Peer,
        own_id: bytes,
        links: Links,
        *,
        no_progress_s: float,
        on_unreadable: Callable[[LocalLink], None],
    ) -> None:
        """Connect to the peer. Raise KvTransferError if it cannot be reached."""
        self.peer = peer
        self.no_progress_s = no_progress_s
        self._links = links
        self._on_unreadable = on_unreadable
        self._loop = asyncio.get_running_loop()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            self._socket.connect(_name(peer.facts.local_name))
            if process_and_user(self._socket)[1] != os.getuid():
                raise PermissionError("the peer's socket belongs to another user")
            self._socket.send(_HELLO.pack(_HELLO_MAGIC, own_id))
        except OSError as error:
            self._socket.close()
            raise KvTransferError(f"the peer cannot be reached: {error}") from error
        self._loop.add_reader(self._socket.fileno(), self._read)

    @property
    def alive(self) -> bool:
        return self._socket.fileno() >= 0

    def begin(self, send: Send) -> None:
        try:
            self._socket.send(_OFFER.pack(_OFFER_MAGIC, send.number, send.buffer.number, send.num_bytes))
        except OSError as error:
            raise KvTransferError(f"the peer cannot be reached: {error}") from error

    def shut(self) -> None:
        if self.alive:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()

    def _read(self) -> None:
        for _ in range(MESSAGES_A_TURN):
            try:
                message = self._socket.recv(_LONGEST)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            verdict = _verdict(message)
            if verdict is None:
                self._links.close(self.peer.address, "the peer is gone")
                self.shut()
            elif verdict[1] is Verdict.TAKEN:
                self._links.ended(self, verdict[0], None)
            else:
                self._on_unreadable(self)
            if not self.alive:
                return


#: Called when a peer offers a piece, with the caller, the piece's number, the buffer's number, and the number of bytes.
OnOffer = Callable[["Caller", int, int, int], None]


class LocalPort:
    """The socket that peers on this host connect to. The constructor opens it on the running loop; raises OSError.

    ``num_refused`` counts connections and messages that were not from peers.
    """

    def __init__(self, peers: KnownPeers, *, on_offer: OnOffer, on_gone: Callable[[Caller], None]) -> None:
        self._peers = peers
        self.on_offer = on_offer
        self._on_gone = on_gone
        self.name = secrets.token_bytes(NAME_BYTES)
        self.num_refused = 0
        self._strangers: OrderedDict[Caller, None] = OrderedDict()
        self._callers: dict[bytes, Caller] = {}
        self.loop = asyncio.get_running_loop()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._socket.bind(_name(self.name))
        self._socket.listen(BACKLOG)
        self._listen()

    def close(self) -> None:
        self.loop.remove_reader(self._socket.fileno())
        self._socket.close()
        for caller in (*self._strangers, *self._callers.values()):
            caller.hang_up()

    def drop(self, peer_id: bytes) -> None:
        """Disconnect a peer that is gone."""
        if peer_id in self._callers:
            self._callers[peer_id].hang_up()

    def introduce(self, caller: Caller, message: bytes) -> Peer | None:
        """Return the peer that a caller's first message names; None unless its process id is the named peer's."""
        if len(message) != _HELLO.size or not message.startswith(_HELLO_MAGIC):
            return None
        peer = self._peers.get(_HELLO.unpack(message)[1])
        if peer is None or peer.facts.pid != caller.pid:
            return None
        del self._strangers[caller]
        self.drop(peer.id)
        self._callers[peer.id] = caller
        return peer

    def gone(self, caller: Caller) -> None:
        self._strangers.pop(caller, None)
        if caller.peer is not None and self._callers.get(caller.peer.id) is caller:
            del self._callers[caller.peer.id]
        self._on_gone(caller)

    def _listen(self) -> None:
        if self._socket.fileno() >= 0:
            self.loop.add_reader(self._socket.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(MESSAGES_A_TURN):
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                log.warning("cannot accept a connection", reason=str(error))
                self.loop.remove_reader(self._socket.fileno())
                self.loop.call_later(FULL_S, self._listen)
                return
            pid, user = process_and_user(connection)
            if user != os.getuid():
                self.num_refused += 1
                connection.close()
                continue
            connection.setblocking(False)
            self._strangers[Caller(self, connection, pid)] = None
            if len(self._strangers) > MAX_STRANGERS:
                self.num_refused += 1
                next(iter(self._strangers)).hang_up()


class Caller:
    """A connection from a process of this user. ``peer`` is None until it has introduced itself."""

    def __init__(self, port: LocalPort, connection: socket.socket, pid: int) -> None:
        self.peer: Peer | None = None
        self.pid = pid
        self._port = port
        self._socket = connection
        port.loop.add_reader(connection.fileno(), self._read)

    def answer(self, number: int, verdict: Verdict) -> None:
        """Answer an offer. A caller that does not read its answers is disconnected."""
        try:
            self._socket.send(_ANSWER.pack(_ANSWER_MAGIC, number, verdict))
        except OSError:
            self.hang_up()

    def hang_up(self) -> None:
        if self._socket.fileno() >= 0:
            self._port.loop.remove_reader(self._socket.fileno())
            self._socket.close()
            self._port.gone(self)

    def _read(self) -> None:
        for _ in range(MESSAGES_A_TURN):
            try:
                message = self._socket.recv(_LONGEST)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if not self._take(message):
                self._port.num_refused += bool(message)
                self.hang_up()
            if self._socket.fileno() < 0:
                return

    def _take(self, message: bytes) -> bool:
        if self.peer is None:
            self.peer = self._port.introduce(self, message)
            return self.peer is not None
        if len(message) != _OFFER.size or not message.startswith(_OFFER_MAGIC):
            return False
        _, number, buffer, num_bytes = _OFFER.unpack(message)
        facts = self.peer.facts
        if buffer >= facts.num_buffers or not HEAD_BYTES <= num_bytes <= facts.buffer_stride:
            return False
        self._port.on_offer(self, number, buffer, num_bytes)
        return True


def answers_here(facts: WorkerAddress) -> bool:
    """Whether a peer is on this host: it listens here, as the process that its address names.

    An equal host id alone is no proof, because machines made from one image can have the same id. Then an unrelated
    process with the peer's number would be read.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(_name(facts.local_name))
            found = process_and_user(probe)
        except BlockingIOError:
            return True  # a full queue is enough proof
        except OSError:
            return False
    return found == (facts.pid, os.getuid())


def _verdict(message: bytes) -> tuple[int, Verdict] | None:
    if len(message) == _ANSWER.size and message.startswith(_ANSWER_MAGIC):
        _, number, verdict = _ANSWER.unpack(message)
        with contextlib.suppress(ValueError):
            return number, Verdict(verdict)
    return None


def _name(name: bytes) -> bytes:
    return b"\0pdmesh-" + name.hex().encode()


def process_and_user(connection: socket.socket) -> tuple[int, int]:
    """Return the process and user at the other end, as the kernel saw them connect or begin to listen."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(found)
    return process, user
