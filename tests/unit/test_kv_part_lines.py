"""Lines between a home and the members on its host: what goes on them, and what ends them without harm."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable

import anyio
import anyio.to_thread
import pytest

from pdmesh.kv.part_lines import (
    MAX_ASKED_BYTES,
    MAX_FRAME_BYTES,
    PATIENCE_S,
    Bell,
    LineHeader,
    PartLine,
    PartLines,
    PartPort,
    Said,
    wait_for_lines,
)
from pdmesh.model import Epoch
from pdmesh.transport.address import peer_id
from pdmesh.transport.seal import MeshKey

pytestmark = pytest.mark.anyio

ADDRESS, KEY, WEIGHTS = b"the member's data address %d" % os.getpid(), MeshKey("token"), 0xABCD
LIMIT_S = 20.0


def asked(number: int) -> LineHeader:
    return LineHeader(b"0123456789abcdef", Epoch(7), (1 << 64) - 1, number, layer=3, member=2)


class Member:
    """Answers with what it was asked, twice."""

    def __init__(self) -> None:
        self.asked: list[Said] = []
        self.before: Callable[[], object] = lambda: None

    def answer(self, header: LineHeader, question: bytes) -> bytes | None:
        self.before()
        self.asked.append((header, question))
        return None if question == b"later" else 2 * question


@pytest.fixture
async def member() -> AsyncIterator[Member]:
    member = Member()
    async with PartPort(ADDRESS, KEY, WEIGHTS, member.answer):
        yield member
    assert not [thread for thread in threading.enumerate() if thread.name == "kv-part-line"]


@pytest.fixture
def lines() -> PartLines:
    return PartLines(b"home", KEY, WEIGHTS)


def line_to(lines: PartLines) -> PartLine:
    lines.connect(os.getpid(), ADDRESS)
    line = lines.line_to(ADDRESS)
    assert line is not None
    return line


def answers(line: PartLine, num_answers: int) -> list[Said]:
    """Wait for answers, as the engine's thread does; fewer if the line ends."""
    bell, said, until_s = Bell(), list[Said](), time.monotonic() + LIMIT_S
    while len(said) < num_answers and line.is_open and time.monotonic() < until_s:
        said += wait_for_lines([line], bell, until_s)
    return said


async def until_ended(line: PartLine) -> None:
    await anyio.to_thread.run_sync(answers, line, 1)
    assert not line.is_open


async def test_questions_of_one_frame_are_answered_in_their_order(member: Member, lines: PartLines) -> None:
    line = line_to(lines)
    questions = [b"first", b"", b"x" * 300_000]
    for number, question in enumerate(questions):
        assert line.put(asked(number), question)
    assert member.asked == []
    lines.flush()
    said = await anyio.to_thread.run_sync(answers, line, 3)
    assert said == [(asked(number), 2 * question) for number, question in enumerate(questions)]
    assert member.asked == [(asked(number), question) for number, question in enumerate(questions)]
    lines.close()


async def test_more_than_a_frame_holds_takes_no_line(member: Member, lines: PartLines) -> None:
    """A second frame before the answers to the first held both ends up, and cost the line."""
    line = line_to(lines)
    question = bytes(MAX_ASKED_BYTES)
    assert not line.put(asked(0), question + b"x")
    for number in range(3):
        assert line.put(asked(number), question)
        assert not line.put(asked(number), b"x")
        line.flush()
        said = await anyio.to_thread.run_sync(answers, line, 1)
        assert [len(answer) for _, answer in said] == [2 * len(question)]
    lines.close()
    assert len(member.asked) == 3


async def test_what_is_not_answered_at_once_holds_nothing_up(member: Member, lines: PartLines) -> None:
    line = line_to(lines)
    for number, question in enumerate((b"later", b"now")):
        assert line.put(asked(number), question)
    line.flush()
    said = await anyio.to_thread.run_sync(answers, line, 1)
    assert said == [(asked(1), b"nownow")]
    lines.close()


async def test_a_bell_wakes_a_thread_that_waits(member: Member, lines: PartLines) -> None:
    line, bell = line_to(lines), Bell()
    bell.ring()
    assert wait_for_lines([line], bell, time.monotonic() + LIMIT_S) == []
    began_s = time.monotonic()
    assert wait_for_lines([line], bell, began_s + 0.05) == []  # it rings once
    assert time.monotonic() - began_s >= 0.05
    lines.close()


async def test_a_closed_line_wakes_a_thread_that_waits_and_takes_no_more(member: Member, lines: PartLines) -> None:
    line, is_waiting = line_to(lines), threading.Event()
    member.before = is_waiting.set
    assert line.put(asked(0), b"later")
    line.flush()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(until_ended, line)
        assert await anyio.to_thread.run_sync(is_waiting.wait, LIMIT_S)
        lines.forget(ADDRESS)
    assert not line.put(asked(1), b"")
    assert lines.line_to(ADDRESS) is None
    lines.connect(os.getpid(), ADDRESS)  # and another one may be had
    assert lines.line_to(ADDRESS) is not None
    lines.close()


async def test_lines_end_with_the_member(lines: PartLines) -> None:
    async with PartPort(ADDRESS, KEY, WEIGHTS, Member().answer):
        line = line_to(lines)
    await until_ended(line)
    lines.connect(os.getpid(), ADDRESS)
    assert lines.line_to(ADDRESS) is None
    lines.close()


@pytest.mark.parametrize("other", [PartLines(b"", MeshKey("other"), WEIGHTS), PartLines(b"", KEY, WEIGHTS + 1)])
async def test_a_home_of_another_mesh_or_other_weights_is_hung_up_on(member: Member, other: PartLines) -> None:
    line = line_to(other)
    await until_ended(line)
    other.close()
    assert member.asked == []


async def test_another_process_than_the_one_that_was_named_is_not_asked(member: Member, lines: PartLines) -> None:
    lines.connect(os.getppid(), ADDRESS)
    assert lines.line_to(ADDRESS) is None


FRAME = struct.Struct("<4sII")
ABOUT = struct.Struct("<16sIQIHHI")


@pytest.mark.parametrize(
    "sent",
    [
        b"no frame at all",
        FRAME.pack(b"pdL1", MAX_FRAME_BYTES + 1, 0),
        FRAME.pack(b"pdL1", 8, 1) + bytes(8),
        FRAME.pack(b"pdL1", 8, (1 << 32) - 1) + bytes(8),
        FRAME.pack(b"pdL1", ABOUT.size + 1, 1) + ABOUT.pack(b"", 0, 0, 0, 0, 0, 1 << 31) + b"x",
    ],
)
async def test_what_is_no_frame_ends_its_line_alone(member: Member, lines: PartLines, sent: bytes) -> None:
    other = line_to(lines)
    hostile = stranger()
    hostile.sendall(KEY.seal(b"pdL1" + peer_id(ADDRESS) + WEIGHTS.to_bytes(4, "little")) + sent)
    assert await anyio.to_thread.run_sync(hostile.recv, 1) == b""
    hostile.close()
    assert other.put(asked(0), b"x")
    other.flush()
    assert len(await anyio.to_thread.run_sync(answers, other, 1)) == 1
    assert [question for _, question in member.asked] == [b"x"]
    lines.close()


async def test_who_says_nothing_is_hung_up_on(member: Member) -> None:
    silent = stranger()
    began_s = time.monotonic()
    assert await anyio.to_thread.run_sync(silent.recv, 1) == b""
    assert time.monotonic() - began_s >= 0.9 * PATIENCE_S
    silent.close()


@pytest.mark.parametrize("sent", [b"not a frame, and long enough", FRAME.pack(b"pdL1", MAX_FRAME_BYTES + 1, 1)])
async def test_a_member_that_answers_nonsense_is_not_asked_on_its_line_again(lines: PartLines, sent: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as port:
        port.bind(name())
        port.listen()
        line = line_to(lines)
        connection, _ = port.accept()
        with connection:
            connection.sendall(sent)
            await until_ended(line)
    lines.close()


async def test_a_member_that_takes_nothing_ends_its_line(lines: PartLines) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as port:
        port.bind(name())
        port.listen()
        line = line_to(lines)

        def fill() -> None:
            for number in range(64):
                line.put(asked(number), bytes(MAX_ASKED_BYTES))
                line.flush()

        async with anyio.create_task_group() as tasks:

            async def wait() -> None:
                """Wait on another thread of the engine: the end of the line wakes it, too."""
                until_s = time.monotonic() + 30 * LIMIT_S
                with anyio.fail_after(LIMIT_S):
                    await anyio.to_thread.run_sync(wait_for_lines, [line], Bell(), until_s, abandon_on_cancel=True)

            tasks.start_soon(wait)
            await anyio.to_thread.run_sync(fill)
        assert not line.is_open
    lines.close()


async def test_a_member_that_can_start_no_thread_takes_the_next_home(
    member: Member, lines: PartLines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr("pdmesh.kv.part_lines.threading.Thread.start", refuse)
        hostile = stranger()
        assert hostile.recv(1) == b""  # not by a thread of anyio's, which could not start, either
    hostile.close()
    await test_what_is_not_answered_at_once_holds_nothing_up(member, lines)


def name() -> bytes:
    return b"\0pdmesh-parts-%d-" % os.getpid() + peer_id(ADDRESS).hex().encode()


def stranger() -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(LIMIT_S)
    connection.connect(name())
    return connection
