"""What the leader of an instance's ranks tells the others, and what they answer, as frames on a socket.

A step goes out as a *delta*: sequences live on every rank, so it names what is new of each since the last step that
computed it, and its size does not depend on how long the contexts are.
"""

from __future__ import annotations

import array
import socket
import struct
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from pdmesh.engine.base import EngineSequence, SequenceSlice
from pdmesh.errors import InstanceUnavailable, ProtocolError
from pdmesh.kv.elsewhere import PartQuestion
from pdmesh.model import RequestId, SamplingParams, num_blocks_for

_LENGTH = struct.Struct("<I")

#: Of a slice: key of the sequence, first position, tokens of the prompt, first tokens whose KV is elsewhere, first
#: blocks that were given back since, known blocks that are left. Of fixed widths: msgpack's integers are longer the
#: larger they are, so a step would grow with the context.
_SLICE_NUMBERS = struct.Struct("<qiiiii")

#: Between processes of one instance; a table of a million blocks is a hundredth of it.
_MAX_FRAME_BYTES = 1 << 30


class SliceDelta(msgspec.Struct, frozen=True, array_like=True):
    """A slice of a step: of which sequence, and what is new of that."""

    numbers: bytes  # `_SLICE_NUMBERS`
    token_ids: bytes  # int32, of the slice
    new_blocks: bytes  # int32, which follow those that are known


class Step(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Compute these slices. With ``hooked``, meet in each layer once its KV is written, and wait for what comes."""

    slices: tuple[SliceDelta, ...]
    ended: tuple[int, ...]  # sequences that no step will name again
    hooked: bool


class StageStep(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Compute a stage's layers of a step, once the stage before it has.

    A hooked step tells of each layer whose KV is written; with ``waits`` it goes on as it is told to.
    """

    number: int  # one more than the last step's
    step: Step
    waits: bool
    scored: tuple[int, ...]  # rows that the last stage computes the logits of
    stays: bool  # the last stage is asked for more of it, until it is told to end it


class Go(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Go on with the layer's attention."""


class Abandon(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Compute no more of this step."""


class Score(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Compute the logits of these rows of the step."""

    rows: tuple[int, ...]


class Answers(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What other instances make of a stage's question: `pdmesh.engine.ranks.rank_elsewhere.AskedRows.answer_rows`."""

    rows: bytes


class Embed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Return these rows of the step behind the last norm."""

    rows: tuple[int, ...]


class EndStep(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Forget the step, of which nothing more is needed."""


class OpenCache(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Map the KV cache, which has so many blocks."""

    num_blocks: int


Command = Step | StageStep | Go | Abandon | Answers | Score | Embed | EndStep | OpenCache


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A rank can compute, with ``kernels`` for a ``reason``.

    ``arithmetic`` is its class, and ``weights`` the identity of the weights that it loaded a part of.
    """

    arithmetic: str
    kernels: str = ""
    reason: str = ""
    weights: str = ""


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A rank could not start."""

    reasons: tuple[str, ...]
    is_configuration: bool


Answer = Ready | Failed


class Begun(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The first stage begins a step."""

    number: int


class Written(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A layer's KV of a step is in the cache."""

    number: int
    layer: int


class Question(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A stage asks about the KV elsewhere of the sequence that has this place in a step."""

    number: int
    place: int
    asked: PartQuestion


class Awaiting(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A stage waits for what its question about this sequence is answered: `Answers`, or `Abandon`."""

    number: int
    place: int


class Left(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A step has left a stage, which computed for so long."""

    number: int
    busy_s: float


class Matrix(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A matrix of a step comes through the last stage's channel: logits of rows, or embeddings. fp32."""

    number: int
    num_rows: int
    num_columns: int


#: What stages tell of the steps that pass them.
Report = Begun | Written | Question | Awaiting | Left | Matrix

_reports: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def frame(message: Command | Answer | Report) -> bytes:
    """Return a message as it goes over a socket."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


def read_command(connection: socket.socket) -> Command | None:
    """Wait for the leader's next command; None if the leader is gone."""
    try:
        return _commands.decode(_read(connection))
    except InstanceUnavailable:
        return None


def read_answer(connection: socket.socket) -> Answer:
    """Wait for what a rank says of its start. Raises InstanceUnavailable if it is gone."""
    return _answers.decode(_read(connection))


def read_report(connection: socket.socket) -> Report:
    """Wait for what a stage says next. Raises InstanceUnavailable if it is gone."""
    return _reports.decode(_read(connection))


def _read(connection: socket.socket) -> bytes:
    (size,) = _LENGTH.unpack(read_exactly(connection, _LENGTH.size))
    if size > _MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {size} bytes between ranks")
    return read_exactly(connection, size)


def read_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    """Wait for so many bytes. Raises InstanceUnavailable if the other end is closed."""
    received = b""
    while len(received) < num_bytes:
        try:
            part = connection.recv(num_bytes - len(received), socket.MSG_WAITALL)
        except OSError:
            part = b""
        if not part:
            raise InstanceUnavailable("another rank of the instance is gone")
        received += part
    return received


class _Known(NamedTuple):
    """What the other ranks know of a sequence."""

    key: int
    num_blocks: int
    num_elsewhere_tokens: int


class Deltas:
    """The leader's side: remembers what the other ranks know of each sequence. The engine's thread only."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}  # by identity
        self._ended: list[int] = []
        self._next_key = 0

    def step(self, batch: Sequence[SequenceSlice], block_size: int, *, hooked: bool) -> Step:
        """Return the command for a step that is about to be computed."""
        slices = tuple(self._slice(part, block_size) for part in batch)
        ended = tuple(self._ended)
        del self._ended[: len(ended)]  # others may have come meanwhile
        return Step(slices, ended, hooked)

    def _slice(self, part: SequenceSlice, block_size: int) -> SliceDelta:
        sequence, num_elsewhere = part.sequence, part.sequence.num_elsewhere_tokens
        key, num_known, num_elsewhere_before = self._known.get(id(sequence)) or self._begin(sequence)
        num_given_back = min(num_known, (num_elsewhere - num_elsewhere_before) // block_size)
        num_known -= num_given_back
        num_blocks = max(num_known, num_blocks_for(part.start + part.num_tokens - num_elsewhere, block_size))
        self._known[id(sequence)] = _Known(key, num_blocks, num_elsewhere)
        return SliceDelta(
            _SLICE_NUMBERS.pack(key, part.start, sequence.num_prompt_tokens, num_elsewhere, num_given_back, num_known),
            part.token_ids.tobytes(),
            array.array("i", sequence.block_table[num_known:num_blocks]).tobytes(),
        )

    def _begin(self, sequence: EngineSequence) -> _Known:
        identity, key = id(sequence), self._next_key
        self._next_key += 1

        def ended() -> None:  # on whichever thread lets go of it; both calls are atomic
            self._ended.append(key)
            self._known.pop(identity, None)

        weakref.finalize(sequence, ended).atexit = False
        return _Known(key, 0, sequence.num_elsewhere_tokens)


@dataclass(frozen=True, slots=True)
class ToldElsewhere:
    """`KvElsewhere` as a step tells ranks of it: how they ask is in `pdmesh.engine.ranks.rank_elsewhere`."""

    num_tokens: int

    def ask(self, question: PartQuestion, *, more: bool = False) -> None:
        raise NotImplementedError("the leader asks")

    def answers(self) -> Sequence[bytes]:
        raise NotImplementedError("the leader is answered")


class Replicas:
    """The other ranks' side: the sequences, as far as steps have told of them."""

    def __init__(self) -> None:
        self._sequences: dict[int, EngineSequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def batch(self, step: Step) -> list[SequenceSlice]:
        """Return the slices of a step, of sequences that are brought up to date. Raises ProtocolError."""
        for key in step.ended:
            self._sequences.pop(key, None)
        return [self._slice(delta) for delta in step.slices]

    def _slice(self, delta: SliceDelta) -> SequenceSlice:
        key, start, num_prompt_tokens, num_elsewhere_tokens, num_given_back, num_known = _SLICE_NUMBERS.unpack(
            delta.numbers
        )
        sequence = self._sequences.get(key)
        if sequence is None:
            sequence = self._sequences[key] = EngineSequence(
                request_id=RequestId(str(key)),
                params=SamplingParams(max_tokens=1),
                token_ids=array.array("i"),
                num_prompt_tokens=num_prompt_tokens,
            )
        sequence.elsewhere = ToldElsewhere(num_elsewhere_tokens) if num_elsewhere_tokens else None
        del sequence.block_table[:num_given_back]
        if len(sequence.block_table) != num_known:
            raise ProtocolError("a step of ranks that does not follow the last one")
        sequence.block_table.extend(_integers(delta.new_blocks))
        token_ids = _integers(delta.token_ids)
        missing = start - len(sequence.token_ids)
        if missing > 0:  # their KV came otherwise: what they are does not matter any more
            sequence.token_ids.frombytes(bytes(missing * sequence.token_ids.itemsize))
        sequence.token_ids[start:] = token_ids
        return SequenceSlice(sequence=sequence, start=start, num_tokens=len(token_ids), sample=False)


def _integers(packed: bytes) -> array.array[int]:
    values = array.array("i")
    values.frombytes(packed)
    return values
