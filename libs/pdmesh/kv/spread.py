"""An owner's side of a spread context: its questions to the shard holders, and their answers."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pdmesh.kv.gate import Wakeup
from pdmesh.kv.part_lines import Bell, LineHeader, PartLine, PartLines, wait_for_lines
from pdmesh.kv.piece import PieceHeader, request_key
from pdmesh.kv.remote_kv import RangeQuestion, RemoteKvLost
from pdmesh.model import Epoch, RequestId

#: Head of a packed question: position of its first row, and length of the owner's address. Address and rows follow.
_START_AND_LENGTH = struct.Struct("<IH")

#: Maximum bytes of a question or an answer, in all its pieces. The rows of a chunk take a few MiB.
MAX_JOINED_BYTES = 1 << 28


def pack_question(home: bytes, question: RangeQuestion) -> bytes:
    """Return a question as bytes. The answer goes to address ``home``, because an owner may move."""
    return _START_AND_LENGTH.pack(question.start, len(home)) + home + question.query


def unpack_question(sent: bytes, layer: int) -> tuple[bytes, RangeQuestion]:
    """Return the owner's address and the question. Raise ValueError if ``sent`` is shorter than its head.

    Neither address nor rows are checked: both are cut off, or empty, where ``sent`` ends early.
    """
    if len(sent) < _START_AND_LENGTH.size:
        raise ValueError(f"a question of {len(sent)} bytes")
    start, length = _START_AND_LENGTH.unpack_from(sent)
    end = _START_AND_LENGTH.size + length
    return sent[_START_AND_LENGTH.size : end], RangeQuestion(layer, start, sent[end:])


@dataclass(slots=True)
class JoinedPieces:
    """A message in several pieces, which arrive in order. ``number`` is the question's, also in an answer."""

    number: int = 0
    came: bytearray = field(default_factory=bytearray)

    def take(self, header: PieceHeader, data: bytes, num_bytes: int) -> bytes | None:
        """Add a piece. Return the whole message of ``num_bytes`` bytes with its last piece, else None.

        A first piece drops an incomplete earlier message. A piece that is not the next one is ignored.
        """
        begin, end = header.part.blocks
        if (begin, end) == (0, num_bytes) and num_bytes == len(data):
            return data
        if begin == 0:
            self.number, self.came = header.chunk, bytearray()
        is_next = begin == len(self.came) and end == begin + len(data) <= num_bytes <= MAX_JOINED_BYTES
        if not is_next or header.chunk != self.number:
            return None
        self.came += data
        return bytes(self.came) if end == num_bytes else None


class PartHolder(NamedTuple):
    """A shard holder. Each question about its range carries ``capability``."""

    address: bytes
    capability: int


class SpreadKv:
    """An owner's side of one spread context. Implements `pdmesh.kv.remote_kv.RemoteKv`.

    ``lost_members`` are the members without an answer. ``bell`` is None without lines, or if no descriptor was left for
    it.
    """

    def __init__(
        self,
        request_id: RequestId,
        epoch: Epoch,
        *,
        members: Sequence[PartHolder],
        num_tokens: int,
        limit_s: float,
        wakeup: Wakeup,
        send: Callable[[SpreadKv, int, RangeQuestion, Sequence[int]], object],
        lines: PartLines | None = None,
        take: Callable[[SpreadKv, LineHeader, bytes], object] | None = None,
    ) -> None:
        """``send`` sends the question of a given number, as pieces, to some members.

        ``take`` receives each answer from ``lines``, also answers about other contexts. The engine's thread calls both.
        """
        self.request_id = request_id
        self.epoch = epoch
        self.key = request_key(request_id)
        self.members = tuple(members)
        self._num_tokens = num_tokens
        self._limit_s = limit_s
        self._wakeup = wakeup
        self._send = send
        self._lines = lines
        self._take = take
        try:
            self.bell = None if lines is None else Bell()
        except OSError:
            self._lines = self.bell = None
        self._number = 0
        self._question: RangeQuestion | None = None
        self._asked = range(0)
        self._answers: dict[int, bytes] = {}
        self._coming: dict[int, JoinedPieces] = {}
        self._on_lines: dict[int, PartLine] = {}
        self._failure: str | None = None
        self.lost_members: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    @property
    def question(self) -> int:
        """Number of the last question."""
        return self._number

    def question_header(self, number: int, layer: int, member: int) -> LineHeader:
        """Return the header of question ``number`` about ``layer`` to a member."""
        return LineHeader(self.key, self.epoch, self.members[member].capability, number, layer, member)

    def ask(self, question: RangeQuestion, *, more: bool = False) -> None:
        self._number += 1
        self._question = question
        self._asked = range(question.first_range, len(self.members))
        self._answers, self._coming, self._on_lines = {}, {}, {}
        if self._lines is not None:
            self._ask_on_lines(self._lines, question)
            if not more:
                self._lines.flush()
        self._ask_by_pieces([member for member in self._asked if member not in self._on_lines])

    def _ask_on_lines(self, lines: PartLines, question: RangeQuestion) -> None:
        asked = pack_question(lines.address, question)
        for member in self._asked:
            line = lines.line_to(self.members[member].address)
            if line is not None and line.put(self.question_header(self._number, question.layer, member), asked):
                self._on_lines[member] = line

    def _ask_by_pieces(self, members: Sequence[int]) -> None:
        if members:
            assert self._question is not None
            self._send(self, self._number, self._question, members)

    def answers(self) -> list[bytes]:
        limit_s = self._limit_s
        if self._on_lines:
            until_s = time.monotonic() + limit_s
            self._wait_on_lines(until_s)
            limit_s = until_s - time.monotonic()
        if not self._wakeup.wait_for(self._is_over, limit_s):
            missing = tuple([number for number in self._asked if number not in self._answers])
            names = ", ".join(map(str, missing))
            self._failure = f"no answer within {self._limit_s:g} s from shard holders {names} of {len(self.members)}"
            self.lost_members = missing
        if self._failure is not None:
            raise RemoteKvLost(self, self._failure)
        return [self._answers[number] for number in self._asked]

    def _is_over(self) -> bool:
        return self._failure is not None or len(self._answers) == len(self._asked)

    def _wait_on_lines(self, until_s: float) -> None:
        """Wait for the answers on lines. Ask members by pieces whose line has ended."""
        assert self.bell is not None
        assert self._take is not None
        while self._on_lines and not self._is_over() and time.monotonic() < until_s:
            for header, answer in wait_for_lines(list(self._on_lines.values()), self.bell, until_s):
                self._take(self, header, answer)
            ended = [member for member, line in list(self._on_lines.items()) if not line.is_open]
            for member in ended:
                self._on_lines.pop(member, None)
            self._ask_by_pieces(ended)

    def take_from_line(self, header: LineHeader, answer: bytes) -> bool:
        """Take an answer, on the engine's thread. Return False if no question waits for the answer."""
        if not self._waits_for(header.member, header.number, header.capability):
            return False
        self._answers[header.member] = answer
        self._on_lines.pop(header.member, None)
        return True

    def take(self, header: PieceHeader, data: bytes) -> bool:
        """Take a piece of an answer, on the event loop. Return False if no question waits for the answer."""
        member = header.source
        if not self._waits_for(member, header.chunk, header.capability):
            return False
        answer = self._coming.setdefault(member, JoinedPieces()).take(header, data, header.num_context_tokens)
        if answer is not None:
            self._answers[member] = answer
            self._ring()
        return True

    def _waits_for(self, member: int, number: int, capability: int) -> bool:
        """Whether an answer is to the last question, from a member that was asked and has this capability."""
        capabilities = [each.capability for each in self.members[member : member + 1]]
        return number == self._number and member in self._asked and capabilities == [capability]

    def set_members(self, members: Sequence[PartHolder], num_tokens: int) -> None:
        """Send later attention queries to ``members``, which hold the first ``num_tokens`` tokens.

        Forget an earlier failure and the lost members. Call between two steps.
        """
        self.members, self._num_tokens = tuple(members), num_tokens
        self._failure, self.lost_members = None, ()

    # --- on the event loop --------------------------------------------------------------------------------------------

    def _ring(self) -> None:
        self._wakeup.ring()
        if self.bell is not None:
            self.bell.ring()

    def fail(self, reason: str, *members: int) -> None:
        """End every wait for answers until `set_members`. Record ``members`` as lost. Only the first reason counts."""
        if self._failure is None:
            self._failure, self.lost_members = reason, members
        self._ring()
