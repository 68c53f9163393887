"""Step times that earlier starts measured, in the user's cache directory.

Each file belongs to one version of a model's files, one way of computing and one kind of machine.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pdmesh import __version__
from pdmesh.config import MeshConfig
from pdmesh.engine.base import Engine
from pdmesh.engine.files import resolve_model
from pdmesh.host import num_usable_cores
from pdmesh.model import MeasuredStep

#: Number of files that are kept (the latest ones), and the most bytes that are read of one.
MAX_FILES, MAX_BYTES = 64, 1 << 14


@dataclass(frozen=True, slots=True)
class KnownSteps:
    """A file with the least time of each step. An unreadable file counts as empty, and failing writes are ignored."""

    file: Path

    def read(self) -> tuple[MeasuredStep, ...]:
        """Return the steps that were timed; none if the file cannot be read."""
        try:
            with self.file.open("rb") as file:
                return msgspec.json.decode(file.read(MAX_BYTES), type=tuple[MeasuredStep, ...])
        except (OSError, msgspec.MsgspecError):
            return ()

    def write(self, steps: Collection[MeasuredStep]) -> None:
        """Replace the file, and remove the oldest files beyond `MAX_FILES`. Failures are ignored."""
        folder = self.file.parent
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder, delete=False) as new:
                new.write(msgspec.json.encode(steps))
            os.replace(new.name, self.file)
            by_age = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
            for path in by_age[MAX_FILES:]:
                path.unlink()


def known_steps(config: MeshConfig, engine: Engine, hardware: str, num_threads: int) -> KnownSteps | None:
    """Return the file for the steps of an engine; None for an engine without model files, or if they cannot be read."""
    if config.worker.engine != "torch":
        return None
    from pdmesh.engine.preloaded import file_versions

    try:
        files = file_versions(resolve_model(str(config.model)), config.worker.lora)
    except OSError:
        return None
    computed = (engine.arithmetic, str(engine.compute_path), hardware, num_usable_cores(), num_threads, __version__)
    digest = hashlib.blake2b(repr((sorted(files), computed)).encode(), digest_size=16).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return KnownSteps(cache / "pdmesh" / "steps" / f"{digest}.json")
