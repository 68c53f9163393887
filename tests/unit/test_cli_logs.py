"""`pdmesh logs`: one stream of lines from the logs of all processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Self

import pytest

from pdmesh.cli.logs import MAX_LINE_BYTES, print_logs
from pdmesh.cli.options import Output
from pdmesh.cli.state_folder import StateFolder
from pdmesh.errors import PdmeshError

LIMIT_S = 60.0


#: The time at which logs are shown: lines of this day have no date.
NOON = datetime(2026, 11, 30, 12, 0, 0, 500_000).astimezone()


class _AtNoon(datetime):
    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Self:
        return cls.fromtimestamp(NOON.timestamp(), tz)


@pytest.fixture(autouse=True)
def at_noon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdmesh.cli.logs.datetime", _AtNoon)


def event(second: int, text: str, *, num_days: int = 0, **more: object) -> str:
    at = (NOON + timedelta(days=num_days, seconds=second)).astimezone(UTC)
    return json.dumps({"event": text, "level": "info", "timestamp": at.isoformat(), **more})


@pytest.fixture
def state(tmp_path: Path) -> StateFolder:
    state = StateFolder("default", tmp_path / "pdmesh/default")
    state.folder.mkdir(parents=True)
    state.log_file("gateway").write_text(f"{event(1, 'one')}\n{event(4, 'four', level='error', reason='a b')}\n")
    state.log_file("decode-0").write_text(
        f"{event(2, 'two', service='decode')}\nTraceback\n  line\n{event(3, 'three')}\n"
    )
    return state


def lines(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_lines_of_all_processes_are_merged_by_time(state: StateFolder, capsys: pytest.CaptureFixture[str]) -> None:
    print_logs(state, (), 100, follow=False, output=Output.TABLE)
    shown = lines(capsys)
    assert [words[-1] for words in shown] == ["one", "two", "Traceback", "line", "three", 'b"']
    assert shown[0][0].endswith(":01.500")
    assert shown[1][1:] == ["decode-0", "info", "two"], "the name says of which service it is"
    assert shown[2] == ["decode-0", "Traceback"]
    assert shown[5][1:] == ["gateway", "error", "four", 'reason="a', 'b"']


def test_lines_of_another_day_have_their_date(state: StateFolder, capsys: pytest.CaptureFixture[str]) -> None:
    state.log_file("gateway").write_text(f"{event(1, 'old', num_days=-1)}\n{event(1, 'new')}\n")
    print_logs(state, ("gateway",), 100, follow=False, output=Output.TABLE)
    old, new = capsys.readouterr().out.splitlines()
    assert old.startswith(f"{NOON - timedelta(days=1):%Y-%m-%d} 12:00:01.500 gateway")
    assert new.startswith("12:00:01.500 gateway")


def test_the_last_lines_of_some_processes_and_the_lines_as_they_are(
    state: StateFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    print_logs(state, (), 2, follow=False, output=Output.TABLE)
    assert [words[3] for words in lines(capsys)] == ["three", "four"]
    print_logs(state, ("gateway",), 100, follow=False, output=Output.JSON)
    assert capsys.readouterr().out == state.log_file("gateway").read_text()
    print_logs(state, (), 0, follow=False, output=Output.TABLE)
    assert capsys.readouterr().out == ""


def test_what_is_not_there_is_said(state: StateFolder, tmp_path: Path) -> None:
    with pytest.raises(PdmeshError, match="no process 'decode-9' has written a log: use decode-0, gateway"):
        print_logs(state, ("decode-9",), 1, follow=False, output=Output.TABLE)
    with pytest.raises(PdmeshError, match="no mesh named 'none' has written logs here"):
        print_logs(StateFolder("none", tmp_path / "none"), (), 1, follow=False, output=Output.TABLE)


def test_a_large_log_is_read_from_its_end_and_long_lines_are_cut(
    state: StateFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    with state.log_file("scheduler").open("w") as log:
        log.writelines(f"{event(5, f'number {number}')}\n" for number in range(20_000))
        log.write("x" * (2 * MAX_LINE_BYTES) + "\n")
    print_logs(state, ("scheduler",), 3, follow=False, output=Output.JSON)
    *numbers, long = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["event"] for line in numbers] == ["number 19998", "number 19999"]
    assert len(long) == MAX_LINE_BYTES


def test_the_end_of_a_log_is_read_in_linear_time_and_from_the_beginning_of_a_line(
    state: StateFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line that is no text, such as what a full disk leaves, may be as long as its log."""
    monkeypatch.setattr("pdmesh.cli.logs._BLOCK_BYTES", 16)
    state.log_file("scheduler").write_bytes(b"\n" + b"x" * (1 << 20) + b"\nlast\n")
    began_s = time.process_time()
    print_logs(state, ("scheduler",), 2, follow=False, output=Output.JSON)
    assert time.process_time() - began_s < 5.0
    long, last = capsys.readouterr().out.splitlines()
    assert (len(long), last) == (MAX_LINE_BYTES, "last")
    state.log_file("scheduler").write_bytes(b"a line that is cut\n\nlast\n")
    print_logs(state, ("scheduler",), 2, follow=False, output=Output.JSON)
    assert capsys.readouterr().out == "last\n"


def test_what_a_log_quotes_moves_no_cursor(state: StateFolder, capsys: pytest.CaptureFixture[str]) -> None:
    said = event(1, "one\x1b]0;title\x07\ntwo", reason="\x9b2J")
    nested = '{"a":' * 10_000
    state.log_file("gateway").write_text(f"{said}\n\x1b[2J{{raw\n{nested}\n")
    print_logs(state, ("gateway",), 9, follow=False, output=Output.TABLE)
    shown = capsys.readouterr().out
    assert all(character.isprintable() or character == "\n" for character in shown)
    assert [words[-1] for words in map(str.split, shown.splitlines())] == [
        r"one\x1b]0;title\x07",
        r"reason=\x9b2J",
        r"\x1b[2J{raw",
        nested,
    ]


def test_new_lines_come_as_they_are_written_also_of_new_emptied_and_replaced_logs(state: StateFolder) -> None:
    command = [sys.executable, "-m", "pdmesh.cli", "logs", "-f", "-n", "1"]
    environ = {"PATH": os.environ["PATH"], "XDG_STATE_HOME": str(state.folder.parents[1])}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None
        assert "four" in follower.stdout.readline()
        gateway = state.log_file("gateway")
        with gateway.open("a") as log:
            log.write(event(6, "six") + "\n")
        assert "six" in follower.stdout.readline()
        state.log_file("prefill-0").write_text(event(7, "seven") + "\n")
        assert "seven" in follower.stdout.readline()
        os.truncate(gateway, 0)
        with gateway.open("a") as log:
            log.write(event(8, "eight") + "\n")
        assert "eight" in follower.stdout.readline()
        gateway.rename(gateway.with_name("gateway.log.1"))
        gateway.write_text(event(9, "nine") + "\n")
        assert "nine" in follower.stdout.readline()
        follower.terminate()
