"""What the meshes of this machine leave on disk: one folder a mesh, with its record, its lock and its logs."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from pdmesh.cli.processes import ProcessId
from pdmesh.errors import ConfigError

DEFAULT_NAME = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceRecord:
    name: str
    process: ProcessId
    facts: dict[str, Any]  # what it announced: addresses, ports


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshRecord:
    """A running mesh, for the commands that look at it. Holds its token: the file is its owner's alone."""

    name: str
    supervisor: ProcessId
    started_at: float  # Unix time, seconds
    ready: bool
    http_address: str
    scheduler_address: str
    mesh_token: str
    model: str
    config: dict[str, Any]
    services: tuple[ServiceRecord, ...]


@dataclass(frozen=True, slots=True)
class MeshState:
    """The folder of one mesh."""

    name: str
    folder: Path

    @property
    def record_file(self) -> Path:
        return self.folder / "mesh.json"

    def log_file(self, service: str) -> Path:
        return self.folder / f"{service}.log"

    def read(self) -> MeshRecord | None:
        """The record of the mesh if it runs now; a record whose supervisor is gone counts as none."""
        try:
            record = msgspec.json.decode(self.record_file.read_bytes(), type=MeshRecord)
        except (OSError, msgspec.MsgspecError):
            return None
        return record if record.supervisor.alive else None

    def write(self, record: MeshRecord) -> None:
        part = self.folder / "mesh.json.part"
        part.touch(mode=0o600)
        part.write_bytes(msgspec.json.format(msgspec.json.encode(record)))
        part.replace(self.record_file)

    def remove(self) -> None:
        self.record_file.unlink(missing_ok=True)

    def rotate_log(self, service: str) -> Path:
        """An empty log for ``service``; that of the run before is kept beside it."""
        log_file = self.log_file(service)
        if log_file.exists():
            log_file.replace(log_file.with_suffix(".log.1"))
        return log_file

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the one supervisor of this name. The kernel drops the lock with the process. Raises ConfigError."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self.folder / "lock").open("wb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(
                    f"a mesh named {self.name!r} is running: stop it with `pdmesh down --name {self.name}`, "
                    "or give this one another --name"
                ) from error
            yield


def state_root(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_STATE_HOME") or os.path.join(environ.get("HOME", os.path.expanduser("~")), ".local/state")
    return Path(base) / "pdmesh"


def mesh_state(environ: Mapping[str, str], name: str) -> MeshState:
    """The folder of the mesh ``name``, which need not exist. Raises ConfigError for a name that is no folder name."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", name):
        raise ConfigError(f"--name is {name!r}: use letters, digits, '.', '_' and '-', at most 63 of them")
    return MeshState(name, state_root(environ) / name)


def running_meshes(environ: Mapping[str, str]) -> list[MeshRecord]:
    root = state_root(environ)
    folders = sorted(root.iterdir()) if root.is_dir() else []
    records = (MeshState(folder.name, folder).read() for folder in folders)
    return [record for record in records if record is not None]
