"""The part of an offload tier on a disk: one file without a name, encrypted with a key that only memory has.

Without a name, no other process can open the file, no link can redirect it, and the system frees it when the process
ends, in whatever way. The remaining bytes on the disk are useless without the key. Each layer of a granule is sealed by
AES-GCM together with the granule's hash, under a number that is used once. So a damaged layer, a layer of another
granule, and a layer of an earlier use of the slot are all detected.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from pdmesh.errors import ConfigError, PdmeshError
from pdmesh.model import PrefixHash

_TAG_BYTES = 16
_MODE = 0o600


class DamagedGranule(PdmeshError):
    """A granule read from the disk that differs from the written one."""


class DiskSlots:
    """Slots for ``num_slots`` granules. ``layer_bytes`` has the size of each of a granule's layers.

    Any thread may read and write, different slots at once.
    """

    def __init__(self, directory: Path, num_slots: int, layer_bytes: Sequence[int]) -> None:
        """Raises ConfigError if no file can be made in ``directory``."""
        self._num_slots = num_slots
        self._layer_bytes = layer_bytes
        self._offsets = list(accumulate((size + _TAG_BYTES for size in layer_bytes), initial=0))
        self._cipher = AESGCM(os.urandom(32))
        self._num_writes = 0
        self._written: dict[int, int] = {}
        try:
            self._file = _open_unnamed(directory)
        except OSError as error:
            raise ConfigError(
                f"no file can be made in worker.kv_offload_dir, {directory}: {error.strerror or error}. Name a "
                "directory of this machine's disk that this user may write to, or set worker.kv_offload_disk_bytes to 0"
            ) from error

    @staticmethod
    def granule_bytes(layer_bytes: Sequence[int]) -> int:
        """Return the number of bytes of a granule on the disk."""
        return sum(size + _TAG_BYTES for size in layer_bytes)

    def close(self) -> None:
        os.close(self._file)

    def number_write(self, slot: int) -> int:
        """Return a new number for the next write into a slot. Event loop only."""
        self._num_writes += 1
        self._written[slot] = self._num_writes
        return self._num_writes

    def number_of(self, slot: int) -> int:
        """Return the number of the last write into a slot. Event loop only."""
        return self._written[slot]

    def write(self, slot: int, number: int, granule: PrefixHash, layers: Sequence[memoryview]) -> None:
        """Encrypt and write the layers of a granule. Raises OSError, on a full disk for instance."""
        for layer, data in enumerate(layers):
            sealed = bytearray(self._layer_bytes[layer] + _TAG_BYTES)
            self._cipher.encrypt_into(_nonce(number, layer), data, granule, sealed)
            self._pwrite(sealed, self._offset(slot, layer))

    def read(self, slot: int, number: int, granule: PrefixHash, layer: int, out: memoryview) -> None:
        """Read and decrypt a layer of a granule. Raises OSError, or DamagedGranule."""
        sealed = bytearray(self._layer_bytes[layer] + _TAG_BYTES)
        num_read, offset = 0, self._offset(slot, layer)
        while num_read < len(sealed):
            more = os.preadv(self._file, [memoryview(sealed)[num_read:]], offset + num_read)
            if more == 0:
                raise DamagedGranule("the file of the offload tier has ended")
            num_read += more
        try:
            self._cipher.decrypt_into(_nonce(number, layer), sealed, granule, out)
        except InvalidTag as error:
            raise DamagedGranule("a cached block on the disk is damaged") from error

    def _offset(self, slot: int, layer: int) -> int:
        assert 0 <= slot < self._num_slots, f"slot {slot} of {self._num_slots}"
        return slot * self._offsets[-1] + self._offsets[layer]

    def _pwrite(self, data: bytearray, offset: int) -> None:
        num_written = 0
        while num_written < len(data):
            num_written += os.pwritev(self._file, [memoryview(data)[num_written:]], offset + num_written)


def _nonce(number: int, layer: int) -> bytes:
    """Return the nonce of a layer. Each is used once, because no two writes have the same number."""
    return number.to_bytes(8, "little") + layer.to_bytes(4, "little")


def _open_unnamed(directory: Path) -> int:
    """Open a new file in ``directory`` without a name, readable by its owner only. Return its descriptor."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, _MODE)
    except (OSError, AttributeError):
        file, name = tempfile.mkstemp(prefix="pdmesh-kv-", dir=directory)
        os.unlink(name)
        return file
