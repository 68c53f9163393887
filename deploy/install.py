"""Install pdmesh and what it needs into ``.venv``, several parts at once: what ``make`` begins with.

    python3 deploy/install.py                     # what `pdmesh up` needs
    python3 deploy/install.py --for test          # that, and what tests and linters need
    python3 deploy/install.py --torch "--index-url URL torch==2.13.0"

The versions are those of ``constraints.txt``. Its sections are installed as they are, by several pips side by side,
since pip spends most of its time in resolving, one package at a time. At the end one pip resolves as usual: where the
list is complete it installs nothing, and where it is not (another Python, a CUDA build of torch) it installs the rest.

A run that was interrupted is repaired by the next one. Needs Python's standard library and pip alone.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin/python"
CONSTRAINTS = ROOT / "constraints.txt"

#: Oldest glibc that the wheels of torch and UCX run on.
OLDEST_GLIBC = (2, 28)

#: How many pips share a section, and seconds after which a part that still runs is named.
NUM_PIPS, PATIENCE_S = 3, 15

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
    """A command that may run beside others."""

    name: str
    command: Sequence[str]


def main() -> int:
    """0 if everything is installed, else 1."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("--for", dest="purpose", choices=["run", "test"], default="run")
    arguments.add_argument("--torch", default="torch==2.13.0", help="what pip is given for torch")
    given = arguments.parse_args()
    began_s = time.monotonic()
    try:
        install(given.purpose, shlex.split(given.torch))
    except InstallationFailed as failure:
        sys.stderr.write(f"{failure}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; the next run goes on from here\n")
        return 1
    say(f"installed in {time.monotonic() - began_s:.0f} s")
    return 0


def install(purpose: str, torch: Sequence[str]) -> None:
    """Install everything for ``purpose``, "run" or "test"."""
    check_platform()
    pins = sections(CONSTRAINTS.read_text())
    say(f"installing into {VENV.name}; downloads are kept in pip's cache")
    if not is_usable(VENV):
        run_together([Part("venv", [sys.executable, "-m", "venv", str(VENV)])])
    forget_unfinished(VENV)
    run_together([Part("pip", pip(*pins["to install"]))])
    wanted = [*pins["to run"], *(pins["to test and lint"] if purpose == "test" else [])]
    packages = [pin for pin in wanted if not pin.startswith("torch==")]
    shares = [packages[start::NUM_PIPS] for start in range(NUM_PIPS)]
    run_together(
        [
            Part(" ".join(torch), pip("--no-deps", *torch)),
            *(Part(f"{share[0]} and {len(share) - 1} more", pip("--no-deps", *share)) for share in shares),
            Part("pdmesh and its CPU kernels", pip("--no-deps", "--no-build-isolation", "--editable", ".")),
        ]
    )
    if not any(ROOT.glob("libs/pdmesh/engine/_kernels*.so")):
        say("without a C++ compiler there are no CPU kernels, and bf16 is slower; install g++ and run make again")
    run_together(
        [
            Part("looking for what is missing", pip(*requirements(purpose))),
            *(Part(f"bytecode of {names[0]}", writing_bytecode(PYTHON, names)) for names in PROGRAMS),
        ]
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
    return [*project["dependencies"], *(extras["test"] + extras["lint"] if purpose == "test" else [])]


def pip(*arguments: str) -> list[str]:
    """pip's command. Bytecode of all of torch takes longer than to install it; most of it is never imported."""
    options = ["--disable-pip-version-check", "--no-input", "install", "-qq", "--no-compile", "-c", str(CONSTRAINTS)]
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


def run_together(parts: Sequence[Part]) -> None:
    """Run all parts at once and say what each took; the first that fails ends the others.

    Raises:
        InstallationFailed: With what the failed part printed.
    """
    try:
        asyncio.run(_run_together(parts))
    except* InstallationFailed as failures:
        raise failures.exceptions[0] from None


async def _run_together(parts: Sequence[Part]) -> None:
    began_s = time.monotonic()
    running = {part.name for part in parts}

    async def finish(part: Part) -> None:
        await run(part)
        running.discard(part.name)
        say(f"{time.monotonic() - began_s:6.1f} s  {part.name}")

    async def name_the_slow() -> None:
        while True:
            await asyncio.sleep(PATIENCE_S)
            say(f"{time.monotonic() - began_s:6.1f} s  still at work: {'; '.join(sorted(running))}")

    async with asyncio.TaskGroup() as group:
        finishing = [group.create_task(finish(part)) for part in parts]
        naming = group.create_task(name_the_slow())
        await asyncio.wait(finishing)
        naming.cancel()


async def run(part: Part) -> None:
    """Run the part's command to its end; it does not outlive a cancellation."""
    process = await asyncio.create_subprocess_exec(*part.command, cwd=ROOT, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT)
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    if process.returncode != 0:
        raise InstallationFailed(f"{part.name} failed:\n{output.decode(errors='replace').strip()}")


def say(line: str) -> None:
    """Print a line now."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
