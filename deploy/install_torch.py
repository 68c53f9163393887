"""Install torch for the Python that runs this: the CPU build where the machine has no NVIDIA device.

    .venv/bin/python deploy/install_torch.py                        # look for a device
    .venv/bin/python deploy/install_torch.py --cpu                  # do not look: an image is built for other machines
    .venv/bin/python deploy/install_torch.py --torch "--index-url URL torch==2.13.0"

The package index has one build of torch for each platform. For Linux that build brings CUDA. The CPU build comes from
the first of these sources that has it: the indexes and folders of pip's configuration, then torch's own index, whose
address uv knows. Where neither can be reached, the package index's build is installed. The sizes in the messages are
downloads of torch 2.13.0 for Python 3.11 on x86-64, with what it depends on alone.

Needs Python's standard library and pip alone.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parents[1] / "constraints.txt"

#: Paths that the NVIDIA driver makes.
DRIVER_PATHS = ("/proc/driver/nvidia/version", "/sys/module/nvidia/version", "/dev/nvidiactl")

#: Environment of uv: fail soon if an index cannot be reached.
UV_ENVIRONMENT = {"UV_HTTP_CONNECT_TIMEOUT": "10", "UV_HTTP_RETRIES": "1", "UV_NO_PROGRESS": "1"}


def main() -> int:
    """Return pip's exit code."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("--torch", default="", help="pip's arguments for torch; then nothing is chosen here")
    arguments.add_argument("--cpu", action="store_true", help="install the CPU build also beside an NVIDIA device")
    arguments.add_argument("--progress-bar", default="on", help="pip's option")
    given = arguments.parse_args()

    def install(*requirements: str, quiet: bool = False) -> int:
        return pip_install("--progress-bar", given.progress_bar, *requirements, quiet=quiet)

    if given.torch:
        return install(*shlex.split(given.torch))
    pin = pinned("torch")
    if not given.cpu and has_nvidia_device():
        say("installing the build for CUDA, about 2.7 GB (an NVIDIA device is here)")
        return install(pin)
    reason = "asked for" if given.cpu else "no NVIDIA device here"
    say(f'installing the CPU build, about 0.2 GB ({reason}; another one: make TORCH="{pin}")')
    if install(f"{pin}+cpu", quiet=True) == 0 or install_with_uv(pin) == 0:
        return 0
    say("no index with CPU builds can be reached: installing the package index's build, about 2.7 GB")
    return install(pin)


def has_nvidia_device() -> bool:
    """Whether the driver is loaded, or nvidia-smi lists a device."""
    if any(Path(path).exists() for path in DRIVER_PATHS):
        return True
    program = shutil.which("nvidia-smi")
    return program is not None and subprocess.run([program, "-L"], capture_output=True, check=False).returncode == 0


def pinned(name: str) -> str:
    """The line of the constraints that pins ``name``."""
    (pin,) = [line for line in CONSTRAINTS.read_text().splitlines() if line.startswith(f"{name}==")]
    return pin


def pip_install(*arguments: str, quiet: bool = False) -> int:
    """Install without dependencies, and without bytecode for all of torch. With ``quiet`` a failure prints nothing."""
    options = ["--no-input", "install", "--no-compile", "--no-deps", *([] if quiet else ["-c", str(CONSTRAINTS)])]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *options, *arguments]
    return subprocess.run(command, stderr=subprocess.DEVNULL if quiet else None, check=False).returncode


def install_with_uv(pin: str) -> int:
    """Install ``pin`` from torch's own index, by a uv that is removed afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        if pip_install("--target", folder, pinned("uv"), quiet=True) != 0:
            return 1
        options = ["--no-config", "--torch-backend", "cpu", "--no-deps", "--python", sys.executable]
        command = [f"{folder}/bin/uv", "pip", "install", *options, pin]
        return subprocess.run(command, env={**UV_ENVIRONMENT, **os.environ}, check=False).returncode


def say(line: str) -> None:
    """Print a line that install.py shows."""
    sys.stdout.write(f"torch: {line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
