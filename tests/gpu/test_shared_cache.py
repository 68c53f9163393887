"""KV from another process's cache on the same device: needs CUDA and the driver's bindings, which torch brings."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import pytest
import torch

from pdmesh.engine.cuda.kv_store import DeviceKvStore
from pdmesh.engine.cuda.shared_cache import CudaDriver
from pdmesh.engine.cuda.streams import CudaStreams
from pdmesh.errors import KvTransferError
from pdmesh.kv_layout import IndexRange, KvLayout

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

#: Of the first layout each layer is an allocation of its own, of the second they share one.
LAYOUTS = [
    KvLayout(num_layers=3, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16"),
    KvLayout(num_layers=3, num_kv_heads=1, head_dim=64, block_size=16, dtype="bfloat16"),
]
NUM_BLOCKS = 512

OWNER = """
import sys, torch
from tests.gpu.test_shared_cache import LAYOUTS, a_store, content
store = a_store(LAYOUTS[int(sys.argv[1])], seed=1)
print(store.shared.describe().hex(), flush=True)
for line in sys.stdin:
    break
"""


def a_store(layout: KvLayout, seed: int) -> DeviceKvStore:
    device = torch.device("cuda", torch.cuda.current_device())
    memory = CudaDriver(device.index, lambda: torch.cuda.current_stream(device).cuda_stream)
    store = DeviceKvStore(layout, NUM_BLOCKS, CudaStreams(device), memory)
    for number, layer in enumerate(store.layers):
        layer.copy_(content(layout, seed, number))
    torch.cuda.synchronize()
    return store


def content(layout: KvLayout, seed: int, layer: int) -> torch.Tensor:
    shape = (NUM_BLOCKS + 1, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(10 * seed + layer)).to(torch.bfloat16)


@pytest.mark.parametrize("number", range(len(LAYOUTS)), ids=["apart", "together"])
def test_blocks_are_copied_from_another_processes_cache(number: int) -> None:
    """In a process of its own; opened on another thread than the engine's, as a worker does."""
    pytest.importorskip("cuda.bindings.driver")
    layout = LAYOUTS[number]
    store = a_store(layout, seed=0)
    shared = store.shared
    assert shared is not None
    theirs = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(2)).tolist()
    ours = list(range(NUM_BLOCKS))
    command = [sys.executable, "-c", OWNER, str(number)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        described = bytes.fromhex(owner.stdout.readline())
        peer = shared.open(owner.pid, described)
        peer.read(IndexRange(0, layout.num_layers), theirs, ours)
        for layer in range(layout.num_layers):
            expected = content(layout, 1, layer)[theirs]
            assert torch.equal(store.layers[layer][:NUM_BLOCKS].cpu(), expected)
        lie = (NUM_BLOCKS << 20).to_bytes(8, "little") + described[8:]
        with pytest.raises(KvTransferError, match="not at the address that it sent"):
            shared.open(owner.pid, lie)
        owner.kill()
        owner.wait()
        with contextlib.suppress(KvTransferError):  # whatever is read now, the window's word says that it is nothing
            peer.read(IndexRange(0, layout.num_layers), theirs, ours)
        peer.close()
        with pytest.raises(KvTransferError):
            shared.open(owner.pid, described)
    store.layers[0].fill_(2)
    assert store.layers[0].eq(2).all(), "this process's computations go on"


def test_the_cache_of_the_same_process_needs_no_handle() -> None:
    pytest.importorskip("cuda.bindings.driver")
    one, other = (a_store(LAYOUTS[0], seed) for seed in range(2))
    assert one.shared is not None
    assert other.shared is not None
    peer = one.shared.open(os.getpid(), other.shared.describe())
    peer.read(IndexRange(2, 3), [5, 6, 1], [0, 1, 2])
    assert torch.equal(one.layers[2][:3], other.layers[2][[5, 6, 1]])
