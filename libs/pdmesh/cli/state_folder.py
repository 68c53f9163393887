"""Files of this machine's meshes: one folder for each mesh, with its record, its lock and its logs."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdmesh.cli.process_id import ProcessId, process_id
from pdmesh.errors import ConfigError, PdmeshError
from pdmesh.rotation import set_aside

if TYPE_CHECKING:
    from pdmesh.config import MeshConfig, SecurityConfig

DEFAULT_NAME = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceRecord:
    name: str
    process: ProcessId
    facts: dict[str, Any]  # announced addresses, ports and the like
    num_restarts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshRecord:
    """Record of a running mesh, for commands. Contains the mesh token, so only its owner may read the file.

    `started_at` is Unix time.
    """

    name: str
    supervisor: ProcessId
    started_at: float
    ready: bool
    http_address: str
    scheduler_address: str
    mesh_token: str
    model: str
    config: dict[str, Any]
    services: tuple[ServiceRecord, ...]

    def security(self, given: SecurityConfig) -> SecurityConfig:
        """Return the given secrets with the mesh's token, and with the mesh's certificates in place of missing ones."""
        own: dict[str, str | None] = self.config.get("security", {})
        names = ("tls_cert", "tls_key", "tls_ca")
        missing: dict[str, Any] = {
            name: Path(path) for name in names if getattr(given, name) is None and (path := own.get(name))
        }
        return replace(given, mesh_token=self.mesh_token, **missing)


@dataclass(frozen=True, slots=True)
class StateFolder:
    """The files of one mesh of this machine: its record and the logs of its services."""

    name: str
    folder: Path

    @property
    def record_file(self) -> Path:
        return self.folder / "mesh.json"

    @property
    def operations_file(self) -> Path:
        """File with the operations that this mesh was asked for, for its scheduler's next start."""
        return self.folder / "operations.json"

    def log_file(self, service: str) -> Path:
        return self.folder / f"{service}.log"

    def read(self) -> MeshRecord | None:
        """Return the mesh's record; None if there is none, or its supervisor has ended."""
        import msgspec

        try:
            record = msgspec.json.decode(self.record_file.read_bytes(), type=MeshRecord)
        except (OSError, msgspec.MsgspecError):
            return None
        return record if record.supervisor.alive else None

    def write(self, record: MeshRecord) -> None:
        """Replace the record. Raise OSError, and leave the old record, if that fails."""
        import msgspec

        part = self.folder / "mesh.json.part"
        try:
            part.touch(mode=0o600)
            part.write_bytes(msgspec.json.format(msgspec.json.encode(record)))
            part.replace(self.record_file)
        except OSError:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise

    def remove(self) -> None:
        """Remove the record. Raise OSError if that fails."""
        self.record_file.unlink(missing_ok=True)

    def write_drain(self, drain_s: float) -> None:
        """Write the drain time that `read_drain` returns: how long requests may continue once the supervisor stops.

        Call this before the supervisor is told to stop. Raise ConfigError if the folder cannot be written.
        """
        with self._usable():
            self._drain_file.write_text(str(drain_s))

    def read_drain(self) -> float | None:
        """Return the seconds that `write_drain` was given; None if it was not called."""
        try:
            return float(self._drain_file.read_text())
        except (OSError, ValueError):
            return None

    def forget_desired(self) -> None:
        """Remove the drain time and the operations of an earlier run of the mesh. Raise ConfigError if that fails."""
        with self._usable():
            self._drain_file.unlink(missing_ok=True)
            self.operations_file.unlink(missing_ok=True)

    @property
    def _drain_file(self) -> Path:
        return self.folder / "drain_s"

    def fresh_log(self, service: str, keep: int) -> Path:
        """Return the path of an empty log for ``service``; ``keep`` earlier ones are kept beside it. Raises
        ConfigError.
        """
        log_file = self.log_file(service)
        with self._usable():
            set_aside(log_file, keep)
        return log_file

    @contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"cannot use the state folder {self.folder}: {error.strerror}; set XDG_STATE_HOME to another folder"
            ) from error

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only supervisor of this name within the block. Raises ConfigError if there is another.

        The kernel drops the lock with the process.
        """
        with self._usable():
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            file = self._lock_file.open("ab", buffering=0)  # "wb" would empty another supervisor's
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(
                    f"a mesh named {self.name!r} is running: stop it with `pdmesh down --name {self.name}`, "
                    "or give this one another --name and --port"
                ) from error
            with suppress(OSError):  # the disk may be full
                file.truncate(0)
                file.write(str(os.getpid()).encode())
            yield

    def supervisor(self) -> ProcessId | None:
        """Return the process that has the lock, even before it has written a record; None if none has it."""
        try:
            with self._lock_file.open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return process_id(int(file.read()))
        except (OSError, ValueError):
            pass
        return None

    @property
    def _lock_file(self) -> Path:
        return self.folder / "lock"


def state_root(environ: Mapping[str, str]) -> Path:
    """Return the folder of all meshes' state: below the home folder, else a private temporary one.

    Raises ConfigError if other users can write to the temporary one.
    """
    if given := environ.get("XDG_STATE_HOME"):
        return Path(given) / "pdmesh"
    below_home = Path(environ.get("HOME") or os.path.expanduser("~")) / ".local/state/pdmesh"
    if below_home.is_absolute() and _can_be_written(below_home):
        return below_home
    try:
        return _private_folder(Path(tempfile.gettempdir()) / f"pdmesh-{os.geteuid()}")
    except FileNotFoundError:  # writes will fail, and report it
        return below_home.absolute()


def _can_be_written(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _private_folder(root: Path) -> Path:
    """Return ``root``, made if need be. Raises ConfigError unless this user alone owns it and can write to it."""
    with suppress(FileExistsError):
        root.mkdir(mode=0o700)
    found = root.lstat()
    if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o022:
        raise ConfigError(f"other users can write to {root}: set XDG_STATE_HOME to a folder of your own")
    return root


def running_meshes(environ: Mapping[str, str]) -> list[MeshRecord]:
    """Return the records of all meshes that run on this machine now."""
    folders = sorted(file.parent for file in state_root(environ).glob("*/mesh.json"))
    records = [StateFolder(folder.name, folder).read() for folder in folders]
    return [record for record in records if record is not None]


def mesh_at(port: int, meshes: Iterable[MeshRecord]) -> MeshRecord | None:
    """Return the mesh that serves at ``port`` of this machine; None if none of ``meshes`` does."""
    return next((mesh for mesh in meshes if mesh.http_address.rpartition(":")[2] == str(port)), None)


def state_folder(environ: Mapping[str, str], name: str) -> StateFolder:
    """Return the folder of the mesh ``name``, which need not exist. Raises ConfigError for an invalid name."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", name):
        raise ConfigError(f"--name is {name!r}: use letters, digits, '.', '_' and '-', at most 63 of them")
    return StateFolder(name, state_root(environ) / name)


def scheduler_of(config: MeshConfig, state: StateFolder) -> tuple[MeshRecord | None, str, SecurityConfig]:
    """Return this machine's mesh (None with --scheduler), the address of its scheduler, and the secrets to show.

    Raises PdmeshError if no such mesh runs, or its scheduler has no address yet.
    """
    if config.scheduler_address:
        return None, config.scheduler_address, config.security
    record = state.read()
    if record is None:
        raise PdmeshError(f"no mesh named {state.name!r} is running: start one with `pdmesh up`, or give --scheduler")
    if not record.scheduler_address:
        raise PdmeshError(f"mesh {state.name!r} is starting; see {state.folder}")
    return record, record.scheduler_address, record.security(config.security)
