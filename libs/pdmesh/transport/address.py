"""What an instance's data address says: which transport, on which host, and the transport's own bytes.

UCX trusts a worker address blindly (a damaged one aborts the process), so ours are framed and checked::

    magic "pdKV" | version u8 | host id 8 bytes | largest payload u32 | length u16 | UCX worker address
    | xxh3_64 of all before

"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import struct
from pathlib import Path
from typing import NamedTuple

import xxhash

from pdmesh.errors import KvTransferError

_FRAME = struct.Struct("<4sB8sIH")
_CHECK = struct.Struct("<Q")
_MAGIC = b"pdKV"
_VERSION = 2


class WorkerAddress(NamedTuple):
    host_id: bytes
    max_payload_bytes: int  # what its receive buffers hold
    worker: bytes


def host_id() -> bytes:
    """Eight bytes equal for processes that can share memory: same boot, host name, and namespaces.

    The network namespace counts too: UCX wakes a sleeping receiver of shared memory through a socket in it (measured
    between containers: without it, transfers hang).
    """
    facts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        facts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
    for namespace in ("ipc", "pid", "net"):
        with contextlib.suppress(OSError):
            facts.append(os.readlink(f"/proc/self/ns/{namespace}"))
    return hashlib.blake2b("\n".join(facts).encode(), digest_size=8).digest()


def pack_address(address: WorkerAddress) -> bytes:
    fields = (address.host_id, address.max_payload_bytes, len(address.worker))
    frame = _FRAME.pack(_MAGIC, _VERSION, *fields) + address.worker
    return frame + _CHECK.pack(xxhash.xxh3_64_intdigest(frame))


def unpack_address(data: bytes) -> WorkerAddress:
    """Inverse of `pack_address`. Raises KvTransferError for anything else."""
    if len(data) < _FRAME.size + _CHECK.size:
        raise KvTransferError(f"not a data address: {len(data)} bytes are too few")
    magic, version, host, max_payload_bytes, length = _FRAME.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        raise KvTransferError("not a data address of this version")
    frame, (check,) = data[: -_CHECK.size], _CHECK.unpack(data[-_CHECK.size :])
    if len(frame) != _FRAME.size + length or xxhash.xxh3_64_intdigest(frame) != check:
        raise KvTransferError("damaged data address")
    return WorkerAddress(host, max_payload_bytes, frame[_FRAME.size :])
