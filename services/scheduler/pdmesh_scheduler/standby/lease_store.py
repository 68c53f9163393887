"""Where a lease record is kept: a store that changes it only for whoever has read what is there."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import msgspec

from pdmesh.errors import PdmeshError
from pdmesh_scheduler.standby.leadership import LeaseRecord

#: A longer one is none of ours: operators' wishes take a few hundred bytes each.
MAX_RECORD_BYTES = 1 << 18


class StoreUnavailable(PdmeshError):
    """The store cannot be asked now, or its answer makes no sense. What was to be written may have been."""


class StoredRecord(NamedTuple):
    """What a store has."""

    record: LeaseRecord | None  # None: nothing was ever written
    version: str | None  # None: the same; each write gives another


class LeaseStore(Protocol):
    """Keeps one record. Several processes, on several hosts, may use the same one."""

    async def read(self) -> StoredRecord:
        """Return the record. Raises StoreUnavailable."""
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
    """Return the record of some JSON. Raises StoreUnavailable."""
    try:
        if len(content) > MAX_RECORD_BYTES:
            raise ValueError(f"{len(content)} bytes are too many")
        return msgspec.json.decode(content, type=LeaseRecord)
    except (msgspec.MsgspecError, ValueError) as error:
        raise StoreUnavailable(f"what the store has is no lease record of pdmesh ({error}): remove it") from error
