"""Reads of another process's memory (cross-memory attach). The death of that process is only an error.

UCX does the same inside a host, but if a sender dies during a read, the receiver dies too: if UCX cannot read, it
aborts, or continues with an endpoint that it has freed (UCX 1.21 and 1.22). So UCX carries only the messages, and the
payload is read here.
"""

from __future__ import annotations

import ctypes
import errno
import os
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
_MAX_PARTS = 1024  # IOV_MAX
_END = 1 << 64  # end of the address space
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)

#: Errors that say that the system forbids reads or has no such call, so that no later read can succeed.
FORBIDDEN = frozenset({errno.EPERM, errno.EACCES, errno.ENOSYS})


def allow_readers() -> None:
    """Let processes of the same user read this one's memory, even where Yama would allow only its ancestors.

    Without Yama the call fails, and is not needed.
    """
    _libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)


def why_unreadable(yama_scope_file: Path = Path("/proc/sys/kernel/yama/ptrace_scope")) -> str | None:
    """Return why no process of this host and user can read another's memory; None if the system allows it.

    Yama's scope 1 is no reason, because `allow_readers` lifts it.
    """
    value = ctypes.c_uint64(1)
    try:
        read_memory(os.getpid(), ctypes.addressof(value), 8, ctypes.addressof(value))
    except OSError as error:
        return f"process_vm_readv fails here ({error.strerror}), as under a strict seccomp filter"
    try:
        scope = int(yama_scope_file.read_text())
    except (OSError, ValueError):
        return None
    if scope <= 1 or (os.geteuid() == 0 and scope == 2):
        return None
    return f"{yama_scope_file} is {scope}"


def read_memory(pid: int, address: int, num_bytes: int, out_address: int) -> None:
    """Copy ``num_bytes`` at ``address`` of a process to ``out_address`` of this one.

    Raise OSError if the system refuses.

    The interpreter is released meanwhile. After an error the copied bytes are undefined.
    """
    done = 0
    while done < num_bytes:
        local = _IoVec(out_address + done, num_bytes - done)
        remote = _IoVec(address + done, num_bytes - done)
        count = _libc.process_vm_readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        if count <= 0:
            code = ctypes.get_errno() if count < 0 else errno.EFAULT
            raise OSError(code, os.strerror(code))
        done += count


def read_parts(pid: int, parts: Sequence[tuple[int, int, int]]) -> None:
    """Copy parts (address there, address here, bytes) as `read_memory` does, 1024 in one call. Raise OSError."""
    for first in range(0, len(parts), _MAX_PARTS):
        some = parts[first : first + _MAX_PARTS]
        remote = _vector((there, size) for there, _, size in some)
        local = _vector((here, size) for _, here, size in some)
        count = _libc.process_vm_readv(pid, local, len(some), remote, len(some), 0)
        if count < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        if count < sum(size for _, _, size in some):  # more than 2 GiB, or unmapped memory
            for there, here, size in some:
                read_memory(pid, there, size, here)


def _vector(parts: Iterable[tuple[int, int]]) -> ctypes.Array[_IoVec]:
    """Return an iovec array of parts (address, bytes). It takes a sixth of the time of ctypes objects."""
    words = array("Q", [word for address, size in parts for word in (address % _END, size)])
    return (_IoVec * (len(words) // 2)).from_buffer(words)


_libc.process_vm_readv.argtypes = (
    ctypes.c_int,
    ctypes.POINTER(_IoVec),
    ctypes.c_ulong,
    ctypes.POINTER(_IoVec),
    ctypes.c_ulong,
    ctypes.c_ulong,
)
_libc.process_vm_readv.restype = ctypes.c_ssize_t
