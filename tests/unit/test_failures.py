"""Why a process failed: the sentence, and that the supervisor hears it from a real service."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from pdmesh.cli.processes import ChildSpec, start_child
from pdmesh.errors import ConfigError, InstanceUnavailable
from pdmesh.failures import sentence, sentences


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "/x/log"),
            "no space is left on the disk (/x/log): free some",
        ),
        (OSError(errno.EMFILE, "Too many open files"), "no more files can be opened: the limit is "),
        (OSError(errno.EACCES, "Permission denied", "/x"), "Permission denied (/x)"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "no thread or process can be started"),
        (RuntimeError("can't start new thread"), "no thread or process can be started"),
        (MemoryError(), "memory ran out"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), "memory ran out"),
        (ImportError("No module named 'torch'"), "No module named 'torch'; the installation is incomplete"),
        (InstanceUnavailable("the engine failed"), "the engine failed"),
        (ValueError("two\nlines"), "ValueError: two"),
        (KeyError(), "KeyError: no message"),
    ],
)
def test_an_error_is_told_in_one_sentence(error: Exception, told: str) -> None:
    assert sentence(error).startswith(told)
    assert "\n" not in sentence(error)


def test_of_several_errors_the_wrong_settings_are_told() -> None:
    group = ExceptionGroup("", [ValueError("x"), ExceptionGroup("", [ConfigError("a is wrong"), ConfigError("b is")])])
    assert sentences(group) == ("a is wrong", "b is")
    assert sentences(ExceptionGroup("", [ValueError("x"), InstanceUnavailable("y")])) == ("y",)


SERVICE = """
import sys
from pdmesh.service import run_from_environment
sys.path.insert(0, {folder!r})
sys.exit(run_from_environment("decode", "failing_service"))
"""

MAIN = """
from pdmesh.config import MeshConfig
from pdmesh.errors import ConfigError, ServiceSuperseded
from pdmesh.service import run_service

async def serve(config, context):
    if {serves}:
        context.announce(address="here")
    raise {error}

def main(config):
    return run_service("decode", config, serve)
"""


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("module", "environment", "code", "told"),
    [
        (MAIN.format(serves=False, error="MemoryError()"), {}, 1, "memory ran out; "),
        (MAIN.format(serves=True, error="OSError(28, 'x', 'y')"), {}, 1, "no space is left on the disk (y)"),
        (MAIN.format(serves=False, error="ConfigError('no model')"), {}, 2, "no model"),
        ("import not_there", {}, 1, "No module named 'not_there'"),
        ("", {"PDMESH_GATEWAY_PORT": "many"}, 2, "PDMESH_GATEWAY_PORT"),
    ],
)
async def test_a_service_tells_its_supervisor_why_it_fails(
    tmp_path: Path, module: str, environment: dict[str, str], code: int, told: str
) -> None:
    (tmp_path / "failing_service.py").write_text(module)
    spec = ChildSpec(
        name="decode",
        command=(sys.executable, "-c", SERVICE.format(folder=str(tmp_path))),
        environment={**os.environ, **environment},
        log_file=Path(os.devnull),  # as where the disk is full
    )
    with anyio.fail_after(30):
        async with start_child(spec) as child:
            facts = await child.ready()
            assert (facts is not None) == ("if True" in module)
            assert await child.wait() == code
            (words,) = child.last_words()
    assert told in words


@pytest.mark.anyio
async def test_a_signal_to_a_child_leaves_its_exit_code_to_whoever_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def poll(_: subprocess.Popen[bytes]) -> int | None:
        raise AssertionError("this may reap the child before asyncio waits for it, which then says 255")

    spec = ChildSpec(
        name="decode", command=("sh", "-c", "exec sleep 60"), environment={**os.environ}, log_file=tmp_path / "log"
    )
    with anyio.fail_after(30):
        async with start_child(spec) as child:
            monkeypatch.setattr(subprocess.Popen, "poll", poll)
            child.send_signal(signal.SIGTERM)
            assert await child.wait() == -signal.SIGTERM
            child.send_signal(signal.SIGTERM)  # to one that has ended it is nothing


def test_a_service_that_was_superseded_says_so_without_a_traceback(tmp_path: Path) -> None:
    """A leader that had lost its lease ended with its sentence among forty lines of a traceback."""
    group = "ExceptionGroup('tasks', [ServiceSuperseded('another leads: start it again')])"
    (tmp_path / "failing_service.py").write_text(MAIN.format(serves=False, error=group))
    command = [sys.executable, "-c", SERVICE.format(folder=str(tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (1, "pdmesh decode: another leads: start it again\n")


def test_a_service_without_a_supervisor_says_it_on_stderr(tmp_path: Path) -> None:
    (tmp_path / "failing_service.py").write_text(MAIN.format(serves=False, error="MemoryError()"))
    command = [sys.executable, "-c", SERVICE.format(folder=str(tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("pdmesh decode: memory ran out; ")
