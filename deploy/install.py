"""Install pdmesh and what it needs into ``.venv``, several parts at once: what ``make`` begins with.

    python3 deploy/install.py                     # what `pdmesh up` needs
    python3 deploy/install.py --for test          # that, and what tests and linters need
    python3 deploy/install.py --torch "--index-url URL torch==2.13.0"

The versions are those of ``constraints.txt``. Its sections are installed as they are, by several pips side by side,
since pip spends most of its time in resolving, one package at a time. At the end one pip resolves as usual: where the
list is complete it installs nothing, and where it is not (another Python, a CUDA build of torch) it installs the rest.
`deploy/install_torch.py` chooses torch's build, unless ``--torch`` does.

A run that was interrupted is repaired by the next one. Needs Python's standard library and pip alone.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin/python"
CONSTRAINTS = ROOT / "constraints.txt"

#: Oldest glibc that the wheels of torch and UCX run on.
OLDEST_GLIBC = (2, 28)

#: How many pips share a section.
NUM_PIPS = 3

#: Seconds between two reports of progress: on a terminal, where one line changes, and elsewhere.
REFRESH_S, PATIENCE_S = 0.5, 15

#: Has pip print its progress as numbers. The pip of a new environment may be too old for that.
RAW = ("--progress-bar", "raw")

#: Folders with a distribution each. pdmesh comes first; its build says with -v which kernel it compiles.
FOLDERS = (".", "./kubernetes", "./lab", "./testing")

#: Size of all packages but torch, by purpose (Python 3.11 on x86-64).
DOWNLOADS = {"run": "0.13 GB", "test": "0.29 GB"}

#: Downloads of this many bytes or more are named with their size when they begin.
LARGE_BYTES = 10e6

#: What to add to the name of a download, by package.
REMARKS = {"libucx_cu13": "; CUDA 13 in its name only: UCX for CPUs, too"}

#: What processes import, by the process that writes the bytecode: while pip resolves, not at the first start. The
#: Dockerfiles have the same modules.
PROGRAMS = (
    ("pdmesh_prefill.main", "pdmesh_decode.main", "pdmesh.engine.runner", "pdmesh.engine.preloaded"),
    ("pdmesh_gateway.main", "pdmesh_scheduler.main", "pdmesh.cli.app", "pdmesh.cli.up", "pdmesh.cli.fork_server"),
)


class InstallationFailed(Exception):
    """The sentence that the user reads."""


@dataclass(frozen=True, slots=True)
class Part:
    """A command that may run beside others, and the number of packages that it installs."""

    name: str
    command: Sequence[str]
    num_packages: int = 0


class Progress:
    """What running parts have done and what is left, read from the output of pip, uv and the kernels' build."""

    def __init__(self, num_packages: int) -> None:
        self._num_packages = num_packages
        #: By part: packages fetched, the latest file, and the download or compilation that runs.
        self._num_fetched: dict[str, int] = {}
        self._file: dict[str, str] = {}
        self._doing: dict[str, str] = {}

    def read(self, part: Part, line: str) -> str:
        """Take a line of the output of ``part``. Return what to tell the user at once, or nothing."""
        if download := re.match(
            r" *(Downloading|Using cached) (\S+?)(?:-py\S*|-cp\S*)?\.(?:whl|tar\.gz) \((.+)\)", line
        ):
            how, file, size = download.groups()
            self._file[part.name] = file = file.replace("%2B", "+")
            self._count(part)
            if how == "Downloading" and num_bytes(size) >= LARGE_BYTES:
                return f"downloading {file} ({size}{REMARKS.get(file.partition('-')[0], '')})"
        elif re.match(r" *(Processing |Requirement already satisfied: )", line):
            self._count(part)
        elif download := re.match(r" *Downloading (\S+) \((\S+iB)\)", line):  # uv
            return f"downloading {download[1]} ({download[2]})"
        elif loaded := re.match(r"Progress (\d+) of (\d+)", line):
            done, total = (int(number) / 1e6 for number in loaded.groups())
            self._doing[part.name] = f"{self._file.get(part.name, part.name)} {done:.0f} of {total:.0f} MB"
            if done == total or total * 1e6 < LARGE_BYTES:
                self.end(part)
        elif kernels := re.search(r"kernels: (level \d+ of \d+ compiled)", line):
            self._doing[part.name] = f"compiling kernels, {kernels[1]}"
        elif line.startswith("torch: "):
            return line
        return ""

    def end(self, part: Part) -> None:
        """Forget what ``part`` was doing."""
        self._doing.pop(part.name, None)

    def _count(self, part: Part) -> None:
        self._num_fetched[part.name] = min(self._num_fetched.get(part.name, 0) + 1, part.num_packages)

    def line(self, running: Sequence[Part]) -> str:
        """The state of all parts. Parts that install packages are one number together."""
        state = [self._doing.get(part.name, "" if part.num_packages else part.name) for part in running]
        if installing := [part.name for part in running if part.num_packages]:
            num_fetched = sum(self._num_fetched.values())
            unpacking = num_fetched == self._num_packages and not self._doing.keys() & installing
            state.insert(0, f"packages {num_fetched}/{self._num_packages}{', unpacking' if unpacking else ''}")
        return "; ".join(filter(None, state))


class Screen:
    """Standard output: plain lines, and on a terminal a last line that changes."""

    def __init__(self) -> None:
        self._changes = sys.stdout.isatty()
        self.refresh_s = REFRESH_S if self._changes else PATIENCE_S

    def say(self, line: str) -> None:
        """Print a line that stays."""
        sys.stdout.write(f"\r\033[K{line}\n" if self._changes else f"{line}\n")
        sys.stdout.flush()

    def show(self, line: str) -> None:
        """Print a line that the next one replaces."""
        if not self._changes:
            return self.say(line)
        sys.stdout.write(f"\r\033[K{line[: shutil.get_terminal_size().columns - 1]}")
        sys.stdout.flush()


def main() -> int:
    """0 if everything is installed, else 1."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("--for", dest="purpose", choices=["run", "test"], default="run")
    arguments.add_argument("--torch", default="", help="pip's arguments for torch (default: install_torch.py chooses)")
    given = arguments.parse_args()
    began_s = time.monotonic()
    try:
        install(given.purpose, given.torch, began_s)
    except InstallationFailed as failure:
        sys.stderr.write(f"{failure}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; the next run goes on from here\n")
        return 1
    say(f"installed in {time.monotonic() - began_s:.0f} s")
    return 0


def install(purpose: str, torch: str, began_s: float) -> None:
    """Install everything for ``purpose``, "run" or "test". Times are printed since ``began_s``."""
    check_platform()
    pins = sections(CONSTRAINTS.read_text())
    say(f"installing into {VENV.name}: about {DOWNLOADS[purpose]} beside torch; downloads are kept in pip's cache")
    say("a first time takes about 3 minutes on two cores, mostly to compile kernels")
    if not is_usable(VENV):
        run_together([Part("virtual environment", [sys.executable, "-m", "venv", str(VENV)])], began_s)
    forget_unfinished(VENV)
    run_together([Part("pip", pip(*pins["to install"]))], began_s)
    wanted = [*pins["to run"], *(pins["to test and lint"] if purpose == "test" else [])]
    packages = [pin for pin in wanted if not pin.startswith("torch==")]
    shares = [packages[start::NUM_PIPS] for start in range(NUM_PIPS)]
    run_together(
        [
            Part("torch", [str(PYTHON), "deploy/install_torch.py", "--torch", torch, *RAW], num_packages=1),
            *(
                Part(
                    f"{len(share)} packages, share {number} of {NUM_PIPS}",
                    pip(*RAW, "--no-deps", *share),
                    num_packages=len(share),
                )
                for number, share in enumerate(shares, 1)
            ),
            Part(
                "pdmesh and its CPU kernels",
                pip("-v", "--no-deps", "--no-build-isolation", *(f"--editable={folder}" for folder in FOLDERS)),
            ),
        ],
        began_s,
    )
    if not any(ROOT.glob("libs/pdmesh/engine/_kernels*.so")):
        say("without a C++ compiler there are no CPU kernels, and bf16 is slower; install g++ and run make again")
    run_together(
        [
            Part("looking for what is missing", pip(*RAW, *requirements(purpose))),
            *(Part(f"bytecode of {names[0]}", writing_bytecode(PYTHON, names)) for names in PROGRAMS),
        ],
        began_s,
    )


def check_platform() -> None:
    """Raise `InstallationFailed` where no wheels of torch and UCX exist."""
    if platform.system() != "Linux":
        raise InstallationFailed(f"pdmesh needs Linux; this is {platform.system()}: use a container or a VM")
    library, version = platform.libc_ver()
    if library != "glibc":
        raise InstallationFailed(
            "pdmesh needs a Linux with glibc, as Debian, Ubuntu and Fedora have; torch has no wheels for musl"
        )
    if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < OLDEST_GLIBC:
        raise InstallationFailed(
            f"pdmesh needs glibc 2.28 or newer (Debian 10, Ubuntu 20.04, RHEL 8); this is {version}"
        )


def sections(constraints: str) -> dict[str, list[str]]:
    """Pins by the comment above them."""
    pins: dict[str, list[str]] = {}
    title = ""
    for line in constraints.splitlines():
        if line.startswith("# "):
            title = line.removeprefix("# ")
        elif line:
            pins.setdefault(title, []).append(line)
    return pins


def requirements(purpose: str) -> list[str]:
    """What pyproject.toml asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *extras["ucx"], *(extras["test"] + extras["lint"] if purpose == "test" else [])]


def pip(*arguments: str) -> list[str]:
    """pip's command. Bytecode of all of torch takes longer than to install it; most of it is never imported."""
    options = ["--disable-pip-version-check", "--no-input", "install", "--no-compile", "-c", str(CONSTRAINTS)]
    return [str(PYTHON), "-m", "pip", *options, *arguments]


def writing_bytecode(python: Path, modules: Sequence[str]) -> list[str]:
    """Return a command that imports modules and writes their bytecode, also where PYTHONDONTWRITEBYTECODE is set.

    Images of Python set it for what is built into them; here each process would compile torch again, for seconds.
    """
    return [str(python), "-c", f"import sys; sys.dont_write_bytecode = False; import {', '.join(modules)}"]


def is_usable(venv: Path) -> bool:
    """Whether the environment's Python is there and has pip."""
    if not (venv / "bin/python").exists():
        return False
    return subprocess.run([venv / "bin/python", "-c", "import pip"], capture_output=True, check=False).returncode == 0


def forget_unfinished(venv: Path) -> None:
    """Remove the metadata of packages whose installation was interrupted, or pip would take them for installed.

    pip writes INSTALLER when a package's files are all there. What it moves away first has a name with a tilde.
    """
    for metadata in venv.glob("lib/python3*/site-packages/*.dist-info"):
        if not (metadata / "INSTALLER").exists():
            shutil.rmtree(metadata)
    for remains in venv.glob("lib/python3*/site-packages/~*"):
        shutil.rmtree(remains, ignore_errors=True)


def run_together(parts: Sequence[Part], began_s: float) -> None:
    """Run all parts at once and say when each ended, in seconds since ``began_s``.

    The first part that fails ends the others.

    Raises:
        InstallationFailed: With what the failed part printed.
    """
    try:
        asyncio.run(_run_together(parts, began_s))
    except* InstallationFailed as failures:
        raise failures.exceptions[0] from None


async def _run_together(parts: Sequence[Part], began_s: float) -> None:
    running = {part.name: part for part in parts}
    screen, progress = Screen(), Progress(sum(part.num_packages for part in parts))

    async def finish(part: Part) -> None:
        await run(part, screen, progress)
        progress.end(running.pop(part.name))
        screen.say(f"{time.monotonic() - began_s:6.1f} s  {part.name}")

    async def report() -> None:
        while True:
            await asyncio.sleep(screen.refresh_s)
            screen.show(f"{time.monotonic() - began_s:6.1f} s  {progress.line(list(running.values()))}")

    async with asyncio.TaskGroup() as group:
        finishing = [group.create_task(finish(part)) for part in parts]
        reporting = group.create_task(report())
        await asyncio.wait(finishing)
        reporting.cancel()


async def run(part: Part, screen: Screen, progress: Progress) -> None:
    """Run the part's command to its end. A cancellation ends the command and its children."""
    process = await asyncio.create_subprocess_exec(
        *part.command, cwd=ROOT, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, limit=2**20, start_new_session=True
    )
    assert process.stdout is not None
    output: list[str] = []
    try:
        async for line in process.stdout:
            output.append(line.decode(errors="replace"))
            if news := progress.read(part, output[-1].rstrip()):
                screen.say(f"          {news}")
        await process.wait()
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            await process.wait()
    if process.returncode != 0:
        printed = "".join(line for line in output if not line.startswith("Progress ")).strip()
        raise InstallationFailed(f"{part.name} failed:\n{printed}")


def num_bytes(size: str) -> float:
    """Read a size as pip prints it, such as "17.6 MB"."""
    number, _, unit = size.partition(" ")
    return float(number) * {"bytes": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}.get(unit, 0)


def say(line: str) -> None:
    """Print a line now."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
