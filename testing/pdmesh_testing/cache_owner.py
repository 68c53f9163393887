"""A process whose KV others read, for tests that stop and kill it.

``python -m pdmesh_testing.cache_owner SEED`` prints, in hex, the note of blocks 0, 1, ... of a `ByteStore` of that
seed, and then reads lines: ``over`` closes their window and writes zeros over all blocks; ``end``, or the end of its
input, ends the process.
"""

from __future__ import annotations

import sys

from pdmesh.kv.peer_reads import PeerReads
from pdmesh.transport.reading import allow_readers
from pdmesh_testing.kv import SMALL_LAYOUT, SMALL_TRANSFER, ByteStore
from pdmesh_testing.memory_transport import MemoryFabric, MemoryTransport

NUM_BLOCKS = 8


def main() -> None:
    allow_readers()
    store = ByteStore(SMALL_LAYOUT, NUM_BLOCKS, seed=int(sys.argv[1]))
    peer_reads = PeerReads(store.shared, SMALL_LAYOUT, MemoryTransport(SMALL_TRANSFER, MemoryFabric()))
    window = peer_reads.begin()
    assert window is not None
    _print(peer_reads.note(window, range(NUM_BLOCKS)).pack().hex())
    for line in sys.stdin:
        if line.strip() != "over":
            break
        window.end()
        store.data[:] = bytes(len(store.data))
        _print("over")


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
