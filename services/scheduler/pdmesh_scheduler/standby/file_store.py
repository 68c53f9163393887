"""A lease record in a file, for schedulers on one host, or on a shared disk with reliable locks and renames."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path

import anyio.to_thread

from pdmesh_scheduler.standby.leadership import LeaseRecord
from pdmesh_scheduler.standby.lease_store import (
    MAX_RECORD_BYTES,
    StoredRecord,
    StoreUnavailable,
    decode_record,
    encode_record,
)


class FileStore:
    """Lease store in a file, replaced under a lock that ends with the process; implements `LeaseStore`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def read(self) -> StoredRecord:
        """Return the record and its version; two Nones without a file. Raise StoreUnavailable if it cannot be read."""
        return await anyio.to_thread.run_sync(self._read, abandon_on_cancel=True)

    async def swap(self, record: LeaseRecord, version: str | None) -> str | None:
        """Write a record if the file still has ``version`` (None: there is no file), and return the new version.

        Return None if the file has another version. Raises StoreUnavailable, also while another process writes.
        """
        return await anyio.to_thread.run_sync(partial(self._swap, record, version), abandon_on_cancel=True)

    def _read(self) -> StoredRecord:
        try:
            with self._path.open("rb") as file:
                content = file.read(MAX_RECORD_BYTES + 1)
        except FileNotFoundError:
            return StoredRecord(None, None)
        except OSError as error:
            raise StoreUnavailable(f"cannot read {self._path}: {error.strerror}") from error
        return StoredRecord(decode_record(content), _version(content))

    def _swap(self, record: LeaseRecord, version: str | None) -> str | None:
        content = encode_record(record)
        # Each write has its own name: an abandoned write may still run in its thread.
        part = self._path.with_name(f"{self._path.name}.{secrets.token_hex(4)}.part")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            with self._locked():
                if self._read().version != version:
                    return None
                part.replace(self._path)
        except OSError as error:
            raise StoreUnavailable(f"cannot write {self._path}: {error.strerror}") from error
        finally:
            with suppress(OSError):
                part.unlink()
        return _version(content)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other processes from writing during a comparison. Raises OSError at once if another one has the lock."""
        lock = self._path.with_name(f"{self._path.name}.lock")
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        finally:
            os.close(descriptor)


def _version(content: bytes) -> str:
    return blake2b(content, digest_size=16).hexdigest()  # each write raises the beat, so no two are alike
