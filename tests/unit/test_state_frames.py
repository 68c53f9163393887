"""How the cache of a model with states is divided between KV, states of requests, and cached states."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pdmesh.config import WorkerConfig
from pdmesh.engine.files import load_model_config
from pdmesh.kv_layout import KvLayout, cache_bytes
from pdmesh.worker.engines import cache_size_of
from pdmesh.worker.state_frames import CacheSize, num_held_frames, state_room

#: Sizes of Qwen3-Next-80B-A3B.
QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "intermediate_size": 5120,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "vocab_size": 151_936,
    "max_position_embeddings": 262_144,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
}


#: A small LFM2 whose convolutions see the token before, as a state's window does.
TWO_TAPS = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 320,
    "layer_types": ["conv", "full_attention"],
    "conv_L_cache": 2,
}


@pytest.fixture
def layout(tmp_path: Path) -> KvLayout:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_NEXT))
    return load_model_config(tmp_path).kv_layout(dtype="bfloat16", block_size=128, frees_windows=True)


def size_of(layout: KvLayout, gib: float, **settings: float) -> CacheSize:
    worker = WorkerConfig(kv_cache_bytes=int(gib * 2**30), **settings)  # type: ignore[arg-type]
    return cache_size_of(worker, layout, free_bytes=None, max_model_len=262_144, max_frames=1)


def test_16_gib_hold_200_000_tokens_of_qwen3_next(layout: KvLayout) -> None:
    size = size_of(layout, 16)
    assert size.num_blocks * 128 > 200_000
    assert state_room(layout, size, 64, 0.4) == (16, 21)


@pytest.mark.parametrize("gib", [1, 4, 16, 64, 100, 128, 256, 1024])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.4, 0.9])
@pytest.mark.parametrize("max_num_seqs", [1, 8, 64])
def test_the_parts_fit_into_the_cache(layout: KvLayout, gib: float, share: float, max_num_seqs: int) -> None:
    size = size_of(layout, gib, cached_states_share=share, max_num_seqs=max_num_seqs)
    assert cache_bytes(layout, size.num_blocks, size.num_frames) <= gib * 2**30
    room = state_room(layout, size, max_num_seqs, share)
    assert room.num_cached * layout.bytes_per_frame <= max(share * gib * 2**30, layout.bytes_per_frame)
    assert room.num_cached >= min(1, size.num_blocks), "no state is cached, so the scheduler would reuse KV alone"
    assert 1 <= room.num_seats <= max_num_seqs
    if gib > 1:
        assert num_held_frames(layout, room.num_seats) + room.num_cached <= size.num_frames
    if gib >= 100:
        assert room.num_seats == max_num_seqs


def test_each_granule_has_a_state_where_states_are_small() -> None:
    layout = KvLayout(
        num_layers=8,
        num_kv_heads=8,
        head_dim=128,
        block_size=128,
        dtype="float32",
        window=2,
        windowed_layers=(1,),
        has_states=True,
    )
    size = size_of(layout, 4)
    assert state_room(layout, size, 64, 0.4) == (64, size.num_blocks)


@pytest.mark.parametrize("frees_windows", [True, False])
def test_layers_with_states_are_told_from_convolutions_of_two_taps(frees_windows: bool, tmp_path: Path) -> None:
    found: list[tuple[int, bool]] = []
    for config in (QWEN3_NEXT, TWO_TAPS):
        (tmp_path / "config.json").write_text(json.dumps(config))
        model = load_model_config(tmp_path)
        layout = model.kv_layout(dtype="bfloat16", block_size=128, frees_windows=frees_windows)
        found.append((layout.window, layout.has_states))
    assert found == ([(2, True), (2, False)] if frees_windows else [(0, False)] * 2)


def test_a_layout_has_one_window_beside_states(layout: KvLayout) -> None:
    with pytest.raises(ValueError, match="layers with states have a window of 2 tokens, not 512"):
        replace(layout, window=512)
