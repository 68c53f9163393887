"""How many blocks an instance's KV cache has."""

from __future__ import annotations

import pytest

from pdmesh.config import HOST_KV_CACHE_BYTES, WorkerConfig
from pdmesh.errors import ConfigError
from pdmesh.model import KvLayout
from pdmesh.worker.engines import num_blocks_of

LAYOUT = KvLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")
BLOCK_BYTES = 32 * 65536


def test_a_device_gives_a_share_of_what_the_weights_leave() -> None:
    assert num_blocks_of(WorkerConfig(), LAYOUT, free_bytes=1000 * BLOCK_BYTES) == 850
    assert num_blocks_of(WorkerConfig(kv_cache_share=0.5), LAYOUT, free_bytes=1000 * BLOCK_BYTES) == 500
    assert num_blocks_of(WorkerConfig(), LAYOUT, free_bytes=None) == HOST_KV_CACHE_BYTES // BLOCK_BYTES


@pytest.mark.parametrize("free_bytes", [None, 1 << 40])
def test_what_is_set_is_taken_anywhere(free_bytes: int | None) -> None:
    config = WorkerConfig(kv_cache_bytes=7 * BLOCK_BYTES + 1)
    assert num_blocks_of(config, LAYOUT, free_bytes=free_bytes) == 7


def test_no_room_for_a_block_is_said() -> None:
    with pytest.raises(ConfigError, match=r"worker\.kv_cache_bytes is 1000"):
        num_blocks_of(WorkerConfig(kv_cache_bytes=1000), LAYOUT, free_bytes=None)
    with pytest.raises(
        ConfigError, match=r"of the 1000 bytes that the weights leave free \(worker.kv_cache_share\) is 850"
    ):
        num_blocks_of(WorkerConfig(), LAYOUT, free_bytes=1000)
