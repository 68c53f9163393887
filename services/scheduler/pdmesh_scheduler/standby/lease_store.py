"""Store of a lease record: a write succeeds only if the writer has read the present record."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import msgspec

from pdmesh.errors import PdmeshError
from pdmesh_scheduler.standby.leadership import LeaseRecord

#: Largest record that is read. Operators' wishes take a few hundred bytes each.
MAX_RECORD_BYTES = 1 << 18


class StoreUnavailable(PdmeshError):
    """The store cannot be asked now, or its answer is malformed. A write that failed may have taken effect."""


class StoredRecord(NamedTuple):
    """Content of a store, and the content's version, which each write changes. Both are None before the first write."""

    record: LeaseRecord | None
    version: str | None


class LeaseStore(Protocol):
    """Store of one record. Several processes, on several hosts, may use the same one."""

    async def read(self) -> StoredRecord:
        """Return the record. Raise StoreUnavailable if the store does not answer."""
        ...

    async def swap(self, record: LeaseRecord, version: str | None) -> str | None:
        """Write a record if the store has ``version``, and return the new version; None if it has another.

        Raises StoreUnavailable.
        """
        ...


def encode_record(record: LeaseRecord) -> bytes:
    """Return a record as JSON."""
    return msgspec.json.encode(record)


def decode_record(content: bytes | str) -> LeaseRecord:
    """Return the record that JSON describes. Raises StoreUnavailable if it is too long or malformed."""
    try:
        if len(content) > MAX_RECORD_BYTES:
            raise ValueError(f"{len(content)} bytes are too many")
        return msgspec.json.decode(content, type=LeaseRecord)
    except (msgspec.MsgspecError, ValueError) as error:
        raise StoreUnavailable(f"the record in the store is not a lease of pdmesh ({error}): remove it") from error
