"""An instance's data address: its host, its buffers, and UCX's own bytes.

UCX trusts a worker address blindly (a damaged one aborts the process), so data addresses are framed and checked::

    magic "pdKV" | version u8 | host id 8 bytes | largest payload u32
    | pid u32 | name of its Unix socket 16 bytes
    | send buffers: address of the first u64, bytes from one to the next u64, number u32
    | length u16 | UCX worker address (none if the instance stays inside its host) | xxh3_64 of all before
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

_FRAME = struct.Struct("<4sB8sII16sQQIH")
_CHECK = struct.Struct("<Q")
_MAGIC = b"pdKV"
_VERSION = 4


class WorkerAddress(NamedTuple):
    """The address at which an instance takes pieces, with the memory that peers on its host may read.

    ``max_payload_bytes`` is the capacity of a receive buffer. Peers on the same host connect to ``local_name``. The
    ``num_buffers`` send buffers begin at ``memory_address``, ``buffer_stride`` bytes apart.
    """

    host_id: bytes
    max_payload_bytes: int
    pid: int
    local_name: bytes
    memory_address: int
    buffer_stride: int
    num_buffers: int
    worker: bytes


def peer_id(address: bytes) -> bytes:
    """Return eight bytes that identify a data address."""
    return hashlib.blake2b(address, digest_size=8).digest()


def host_id() -> bytes:
    """Return eight bytes that are equal for processes that can share memory: same boot, host name and namespaces.

    The network namespace counts too, because UCX wakes a sleeping receiver of shared memory through a socket in it
    (measured between containers: otherwise transfers hang).
    """
    facts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        facts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
    for namespace in ("ipc", "pid", "net"):
        with contextlib.suppress(OSError):
            facts.append(os.readlink(f"/proc/self/ns/{namespace}"))
    return hashlib.blake2b("\n".join(facts).encode(), digest_size=8).digest()


def host_label() -> str:
    """Return this host's name for people, with a part that distinguishes hosts of one name: ``node-1/3fa2c1``."""
    return f"{socket.gethostname()}/{host_id().hex()[:6]}"


def pack_address(address: WorkerAddress) -> bytes:
    """Return a data address as the bytes that the scheduler passes on, with a checksum at their end."""
    frame = _FRAME.pack(_MAGIC, _VERSION, *address[:-1], len(address.worker)) + address.worker
    return frame + _CHECK.pack(xxhash.xxh3_64_intdigest(frame))


def unpack_address(data: bytes) -> WorkerAddress:
    """Decode the result of `pack_address`. Raises KvTransferError for other bytes."""
    if len(data) < _FRAME.size + _CHECK.size:
        raise KvTransferError(f"not a data address: {len(data)} bytes are too few")
    magic, version, *facts, length = _FRAME.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        raise KvTransferError("not a data address of this version")
    frame, (check,) = data[: -_CHECK.size], _CHECK.unpack(data[-_CHECK.size :])
    if len(frame) != _FRAME.size + length or xxhash.xxh3_64_intdigest(frame) != check:
        raise KvTransferError("the data address is damaged")
    return WorkerAddress._make((*facts, frame[_FRAME.size :]))
