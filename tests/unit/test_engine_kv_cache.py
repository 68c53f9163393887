from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from pdmesh.engine.kv_cache import TorchKvStore, memory_bytes
from pdmesh.kv_layout import IndexRange, KvLayout, PageShape

LAYOUT = KvLayout(num_layers=2, num_kv_heads=3, head_dim=4, block_size=5, dtype="bfloat16")


def test_gather_and_scatter_are_inverse_and_follow_the_order_of_ids() -> None:
    store = TorchKvStore(LAYOUT, 7)
    data = bytes(range(240)) * 3
    assert LAYOUT.max_page_bytes == 240
    data = data[:240] + data[1:241] + data[2:242]
    store.scatter(1, [6, 0, 3], memoryview(data))
    out = bytearray(720)
    store.gather(1, [6, 0, 3], memoryview(out))
    assert bytes(out) == data
    store.gather(1, [3, 6, 0], memoryview(out))
    assert bytes(out) == data[480:] + data[:480]
    store.gather(1, [1, 2, 4], memoryview(out))
    assert bytes(out) == bytes(720)
    assert not store.layers[0].any()


def test_a_piece_is_keys_then_values_of_one_block() -> None:
    store = TorchKvStore(LAYOUT, 2)
    store.layers[0][1, 0] = 1.0
    store.layers[0][1, 1] = 2.0
    out = bytearray(240)
    store.gather(0, [1], memoryview(out))
    piece = torch.frombuffer(out, dtype=torch.bfloat16).view(2, 3, 5, 4)
    assert (piece[0] == 1).all()
    assert (piece[1] == 2).all()


def test_layers_with_other_heads_have_pages_of_their_own() -> None:
    pages = (PageShape(3, 4), PageShape(1, 32), PageShape(3, 4))
    layout = replace(LAYOUT, num_layers=3, pages=pages)
    assert [layout.page_bytes(layer) for layer in range(3)] == [240, 640, 240]
    assert (layout.max_page_bytes, layout.bytes_per_block, layout.token_bytes) == (640, 1120, 224)
    assert layout.bytes_of(IndexRange(1, 3)) == 880
    assert layout.distinct_pages == pages[:2]
    stores = [TorchKvStore(layout, 7), TorchKvStore(layout, 7, torch.zeros(7 * 1120, dtype=torch.uint8))]
    for store in stores:
        assert [tuple(layer.shape[1:]) for layer in store.layers] == [(2, 3, 5, 4), (2, 1, 5, 32), (2, 3, 5, 4)]
        for layer in range(3):
            data = bytes(random.Random(layer).randbytes(2 * layout.page_bytes(layer)))
            store.scatter(layer, [5, 2], memoryview(data))
            out = bytearray(len(data))
            store.gather(layer, [2, 5], memoryview(out))
            size = layout.page_bytes(layer)
            assert bytes(out) == data[size:] + data[:size]
    with pytest.raises(ValueError, match="3 shapes of pages"):
        replace(layout, num_layers=2)


def test_windows_count_the_bytes_of_their_own_layers() -> None:
    layout = replace(LAYOUT, pages=(PageShape(3, 4), PageShape(1, 32)), window=8, windowed_layers=(1,))
    assert (layout.bytes_per_block, layout.bytes_per_frame) == (880, 640)


def test_processes_that_share_a_cache_share_the_frames_of_blocks() -> None:
    layout = replace(LAYOUT, window=8, windowed_layers=(1,))
    memory = torch.zeros(memory_bytes(layout, 7, 3), dtype=torch.uint8)
    leader, stage = (TorchKvStore(layout, 7, memory, 3) for _ in range(2))
    assert leader.frames is not None
    assert stage.frames is not None
    assert [len(layer) for layer in stage.layers] == [7, 4]
    leader.frames.of_block[:] = [3, 3, 3, 3, 3, 2, 3]
    assert stage.frames.of_block[5] == 2
    stage.layers[0][6], stage.layers[1][2] = 2.0, 1.0
    for layer, block_id in ((0, 6), (1, 5)):
        out = bytearray(240)
        leader.gather(layer, [block_id], memoryview(out))
        assert (torch.frombuffer(out, dtype=torch.bfloat16) == 2.0 - layer).all()


def test_no_block_outside_the_cache_is_touched() -> None:
    store = TorchKvStore(LAYOUT, 2)
    for block_id in (-1, 2):
        with pytest.raises(IndexError, match="2 blocks"):
            store.scatter(0, [block_id], memoryview(bytes(240)))
    with pytest.raises(ValueError, match="reshape"):
        store.scatter(0, [0], memoryview(bytes(239)))
    store.gather(0, [], memoryview(bytearray()))
