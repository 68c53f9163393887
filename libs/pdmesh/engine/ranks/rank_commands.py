"""Commands of the leader to the other ranks of an instance, and their replies, as frames on a socket.

A step is sent as a *delta*. Every rank keeps the sequences, so a step contains only what changed in each since the last
step with it. Its size does not depend on the lengths of contexts.
"""

from __future__ import annotations

import array
import socket
import struct
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from pdmesh.engine.base import EngineSequence, SequenceSlice
from pdmesh.errors import InstanceUnavailable, ProtocolError
from pdmesh.kv.remote_kv import RangeQuestion, RemoteKv
from pdmesh.kv_layout import num_blocks_for
from pdmesh.model import RequestId, SamplingParams

_LENGTH = struct.Struct("<I")

#: Numbers of a slice: key of the sequence, first position, prompt tokens, first tokens whose KV is remote, first
#: blocks freed since the last step, known blocks left, whether the step is only timed. The widths are fixed: msgpack's
#: integers grow with their values, so a step would grow with the context.
_SLICE_NUMBERS = struct.Struct("<qiiiii?")

#: Largest frame between processes of one instance. A table of a million blocks takes a hundredth of it.
_MAX_FRAME_BYTES = 1 << 30


class SliceDelta(msgspec.Struct, frozen=True, array_like=True):
    """A slice of a step, with the changes of its sequence since the last step.

    ``numbers`` are `_SLICE_NUMBERS`. ``token_ids`` (int32) are the slice's. ``new_blocks`` (int32) follow the known
    ones.
    """

    numbers: bytes
    token_ids: bytes
    new_blocks: bytes


class Step(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Compute these slices. With ``hooked``, meet in each layer after its KV is written, and wait for the next command.

    ``ended`` are the keys of sequences that later steps will not name.
    """

    slices: tuple[SliceDelta, ...]
    ended: tuple[int, ...]
    hooked: bool


class StageStep(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Compute a stage's layers of a step, after the stage before has.

    In a hooked step, report each layer whose KV is written; with ``waits``, continue only on `Go`. ``number`` is one
    more than the last step's. The last stage computes the logits of the rows ``scored``. If ``stays``, it then serves
    further requests until `EndStep`.
    """

    number: int
    step: Step
    waits: bool
    scored: tuple[int, ...]
    stays: bool


class Go(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Continue with the layer's attention."""


class Abandon(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Stop computing this step."""


class Score(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Compute the logits of these rows of the step."""

    rows: tuple[int, ...]


class Answers(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Other instances' answers to a stage's question: `pdmesh.engine.ranks.rank_elsewhere.AskedRows.answer_rows`."""

    rows: bytes


class Embed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Send these rows of the step after the last norm."""

    rows: tuple[int, ...]


class EndStep(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Release the step; no more requests about it follow."""


class OpenCache(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Map the KV cache of ``num_blocks`` blocks; layers with a window have ``num_frames``, None: one a block."""

    num_blocks: int
    num_frames: int | None


Command = Step | StageStep | Go | Abandon | Answers | Score | Embed | EndStep | OpenCache


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Report that a rank can compute, with ``kernels`` for a ``reason``.

    ``arithmetic`` is its arithmetic class. ``weights`` is the identity of the checkpoint's weights.
    """

    arithmetic: str
    kernels: str = ""
    reason: str = ""
    weights: str = ""


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Report that a rank could not start."""

    reasons: tuple[str, ...]
    is_configuration: bool


Answer = Ready | Failed


class Begun(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Report that the first stage begins a step."""

    number: int


class Written(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Report that a layer's KV of a step is in the cache."""

    number: int
    layer: int


class Question(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Question of a stage about the KV on other instances of the sequence at ``place`` in a step."""

    number: int
    place: int
    asked: RangeQuestion


class Awaiting(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Report that a stage waits for the reply to its question about this sequence: `Answers` or `Abandon`."""

    number: int
    place: int


class Left(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Report that a step has left a stage after ``busy_s`` seconds of computation."""

    number: int
    busy_s: float


class Matrix(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Report that the last stage's channel has a matrix of a step: logits or embeddings of rows, in fp32."""

    number: int
    num_rows: int
    num_columns: int


#: Reports of stages about the steps that pass them.
Report = Begun | Written | Question | Awaiting | Left | Matrix

_reports: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def frame(message: Command | Answer | Report) -> bytes:
    """Return a message with its length, as sent over a socket."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


def read_command(connection: socket.socket) -> Command | None:
    """Wait for the leader's next command. Return None if the leader is gone."""
    try:
        return _commands.decode(_read(connection))
    except InstanceUnavailable:
        return None


def read_answer(connection: socket.socket) -> Answer:
    """Wait for a rank's report of its start. Raise InstanceUnavailable if the rank is gone."""
    return _answers.decode(_read(connection))


def read_report(connection: socket.socket) -> Report:
    """Wait for a stage's next report. Raise InstanceUnavailable if the stage is gone."""
    return _reports.decode(_read(connection))


def _read(connection: socket.socket) -> bytes:
    (size,) = _LENGTH.unpack(read_exactly(connection, _LENGTH.size))
    if size > _MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {size} bytes between ranks")
    return read_exactly(connection, size)


def read_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    """Wait for ``num_bytes`` bytes. Raise InstanceUnavailable if the other end is closed."""
    received = b""
    while len(received) < num_bytes:
        try:
            part = connection.recv(num_bytes - len(received), socket.MSG_WAITALL)
        except OSError:
            part = b""
        if not part:
            raise InstanceUnavailable("another rank of the instance ended")
        received += part
    return received


class _Known(NamedTuple):
    """State of a sequence that the other ranks know."""

    key: int
    num_blocks: int
    num_remote_tokens: int


class Deltas:
    """The leader's record of each sequence's state on the other ranks. Only the engine's thread may use it."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._ended: list[int] = []
        self._next_key = 0

    def step(self, batch: Sequence[SequenceSlice], block_size: int, *, hooked: bool) -> Step:
        """Return the command for a step, and record that the ranks know its changes."""
        slices = tuple(self._slice(part, block_size) for part in batch)
        ended = tuple(self._ended)
        del self._ended[: len(ended)]  # sequences may have ended meanwhile
        return Step(slices, ended, hooked)

    def _slice(self, part: SequenceSlice, block_size: int) -> SliceDelta:
        sequence, num_elsewhere = part.sequence, part.sequence.num_remote_tokens
        key, num_known, num_elsewhere_before = self._known.get(id(sequence)) or self._begin(sequence)
        num_given_back = min(num_known, (num_elsewhere - num_elsewhere_before) // block_size)
        num_known -= num_given_back
        num_blocks = max(num_known, num_blocks_for(part.start + part.num_tokens - num_elsewhere, block_size))
        self._known[id(sequence)] = _Known(key, num_blocks, num_elsewhere)
        numbers = key, part.start, sequence.num_prompt_tokens, num_elsewhere, num_given_back, num_known
        return SliceDelta(
            _SLICE_NUMBERS.pack(*numbers, sequence.is_timing),
            part.token_ids.tobytes(),
            array.array("i", sequence.block_table[num_known:num_blocks]).tobytes(),
        )

    def _begin(self, sequence: EngineSequence) -> _Known:
        identity, key = id(sequence), self._next_key
        self._next_key += 1

        def ended() -> None:  # runs on the thread that drops the last reference; both calls are atomic
            self._ended.append(key)
            self._known.pop(identity, None)

        weakref.finalize(sequence, ended).atexit = False
        return _Known(key, 0, sequence.num_remote_tokens)


class Replicas:
    """The other ranks' copies of the sequences, updated by steps."""

    def __init__(self) -> None:
        self._sequences: dict[int, EngineSequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def batch(self, step: Step, elsewhere_of: Callable[[int, int], RemoteKv]) -> list[SequenceSlice]:
        """Return a step's slices with updated sequences. Raise ProtocolError if it does not follow the last step.

        ``elsewhere_of`` makes the `RemoteKv` of a slice, given the slice's index and the number of tokens there.
        """
        for key in step.ended:
            self._sequences.pop(key, None)
        return [self._slice(delta, partial(elsewhere_of, index)) for index, delta in enumerate(step.slices)]

    def _slice(self, delta: SliceDelta, elsewhere_of: Callable[[int], RemoteKv]) -> SequenceSlice:
        key, start, num_prompt_tokens, num_remote_tokens, num_given_back, num_known, is_timing = _SLICE_NUMBERS.unpack(
            delta.numbers
        )
        sequence = self._sequences.get(key)
        if sequence is None:
            sequence = self._sequences[key] = EngineSequence(
                request_id=RequestId(str(key)),
                params=SamplingParams(max_tokens=1),
                token_ids=array.array("i"),
                num_prompt_tokens=num_prompt_tokens,
                is_timing=is_timing,
            )
        sequence.elsewhere = elsewhere_of(num_remote_tokens) if num_remote_tokens else None
        del sequence.block_table[:num_given_back]
        if len(sequence.block_table) != num_known:
            raise ProtocolError("a rank's step is out of order")
        sequence.block_table.extend(_integers(delta.new_blocks))
        token_ids = _integers(delta.token_ids)
        missing = start - len(sequence.token_ids)
        if missing > 0:  # other ways brought their KV, so their ids are not needed
            sequence.token_ids.frombytes(bytes(missing * sequence.token_ids.itemsize))
        sequence.token_ids[start:] = token_ids
        return SequenceSlice(sequence=sequence, start=start, num_tokens=len(token_ids), sample=False)


def _integers(packed: bytes) -> array.array[int]:
    values = array.array("i")
    values.frombytes(packed)
    return values
