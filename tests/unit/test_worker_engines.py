"""How many blocks an instance's KV cache has."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdmesh.cli.preflight import check_settings
from pdmesh.config import HOST_KV_CACHE_BYTES, InstanceDegrees, MeshConfig, PoolConfig, WorkerConfig
from pdmesh.errors import ConfigError
from pdmesh.kv_layout import GRANULE_TOKENS, KvLayout, cache_bytes, num_blocks_for
from pdmesh.policy.latency import PROFILES, ChunkShape, StepShape
from pdmesh.worker.engines import (
    EngineFacts,
    build_engine,
    cache_size_of,
    check_ranks_can_compute,
    engine_facts,
    frees_behind_windows,
    max_frames_of,
)
from pdmesh.worker.measuring import step_s
from pdmesh_testing import fake_engine as fake
from pdmesh_testing.checkpoints import TINY, write_config
from pdmesh_testing.configured_fake import parse_latency
from pdmesh_testing.transformers_checkpoints import model_variants, write_transformers_checkpoint

LAYOUT = KvLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")
BLOCK_BYTES = 32 * 65536


def num_blocks_of(*args: Any, **kwargs: Any) -> int:
    return cache_size_of(*args, **kwargs).num_blocks


def test_a_device_gives_a_share_of_what_the_weights_leave() -> None:
    assert num_blocks_of(WorkerConfig(), LAYOUT, max_model_len=4096, free_bytes=1000 * BLOCK_BYTES) == 850
    assert (
        num_blocks_of(WorkerConfig(kv_cache_share=0.5), LAYOUT, max_model_len=4096, free_bytes=1000 * BLOCK_BYTES)
        == 500
    )
    assert (
        num_blocks_of(WorkerConfig(), LAYOUT, free_bytes=None, max_model_len=4096) == HOST_KV_CACHE_BYTES // BLOCK_BYTES
    )


def test_the_host_gives_a_share_of_what_is_free_and_never_more_than_is_of_use() -> None:
    worker = WorkerConfig(kv_cache_host_share=0.25, max_num_seqs=8)
    of = partial(num_blocks_of, worker, LAYOUT, free_bytes=None)
    assert of(max_model_len=1 << 20, host_bytes=1000 * BLOCK_BYTES) == 250
    assert of(max_model_len=10 * LAYOUT.block_size, host_bytes=1000 * BLOCK_BYTES) == 80


@pytest.mark.parametrize("free_bytes", [None, 1 << 40])
def test_what_is_set_is_taken_anywhere(free_bytes: int | None) -> None:
    config = WorkerConfig(kv_cache_bytes=7 * BLOCK_BYTES + 1)
    assert num_blocks_of(config, LAYOUT, free_bytes=free_bytes, max_model_len=4096) == 7


def test_no_room_for_a_block_is_said() -> None:
    with pytest.raises(ConfigError, match=r"worker\.kv_cache_bytes is 1000"):
        cache_size_of(WorkerConfig(kv_cache_bytes=1000), LAYOUT, free_bytes=None, max_model_len=4096)
    with pytest.raises(
        ConfigError, match=r"of the 1000 bytes that the weights leave free \(worker.kv_cache_share\) is 850"
    ):
        cache_size_of(WorkerConfig(), LAYOUT, free_bytes=1000, max_model_len=4096)


WINDOWED = replace(LAYOUT, window=512, windowed_layers=tuple(n for n in range(32) if n % 6 != 5))


@pytest.mark.parametrize("num_blocks_worth", [3, 100, 400, 5000, 50_000])
def test_what_layers_with_a_window_leave_goes_to_the_others(num_blocks_worth: int) -> None:
    kv_cache_bytes = num_blocks_worth * BLOCK_BYTES
    config = MeshConfig(worker=WorkerConfig(kv_cache_bytes=kv_cache_bytes, max_num_seqs=8))
    max_frames = max_frames_of(config, WINDOWED, 1 << 17)
    of = partial(num_blocks_of, config.worker, free_bytes=None, max_model_len=1 << 17)
    num_blocks = of(WINDOWED, max_frames=max_frames)
    num_frames = min(num_blocks, max_frames)
    assert cache_bytes(WINDOWED, num_blocks, num_frames) <= kv_cache_bytes
    assert (num_blocks > of(LAYOUT)) == (num_frames < num_blocks)
    assert num_blocks >= of(LAYOUT) - 1  # a frame of zeros
    num_seen = num_blocks_for(WINDOWED.window + GRANULE_TOKENS, WINDOWED.block_size) + 1
    assert max_frames >= 8 * num_seen + num_blocks_for(config.policy.max_chunk_tokens, WINDOWED.block_size)


def test_a_model_of_windows_alone_has_as_many_blocks_as_its_requests_can_fill() -> None:
    layout = replace(LAYOUT, window=512, windowed_layers=tuple(range(32)))
    config = MeshConfig(worker=WorkerConfig(kv_cache_bytes=2000 * BLOCK_BYTES, max_num_seqs=8))
    max_frames = max_frames_of(config, layout, 1 << 17)
    of = partial(num_blocks_of, config.worker, layout, free_bytes=None, max_frames=max_frames)
    assert of(max_model_len=1 << 17) == 8 * (1 << 17) // layout.block_size


@pytest.mark.parametrize(
    ("settings", "is_freed"),
    [
        ({}, True),
        ({"free_behind_windows": False}, False),
        ({"kv_offload_host_bytes": 1 << 20}, False),
        ({"max_kv_tokens_per_instance": 64}, False),
    ],
)
def test_kv_behind_windows_is_given_up_where_nothing_needs_it(
    tmp_path: Path, settings: dict[str, Any], is_freed: bool
) -> None:
    options = model_variants()["gemma3_text"][0]
    checkpoint = write_transformers_checkpoint(tmp_path, "gemma3_text", **options)
    config = MeshConfig(model=str(checkpoint), worker=WorkerConfig(device="cpu", kv_cache_bytes=16 << 20, **settings))
    assert frees_behind_windows(config) == is_freed
    engine = build_engine(config, 1)
    assert engine.kv.layout.windowed_layers == ((0, 1, 2, 3, 4, 6) if is_freed else ())
    assert (engine.kv.frames is not None) == is_freed


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"speculation": "ngram"}, "verifies no drafts so far: set off"),
        ({"free_behind_windows": False}, "needs worker.free_behind_windows"),
        ({"block_size": 16}, "two states a block: set it to 128"),
        ({}, ""),
    ],
)
def test_what_a_model_with_states_needs_is_said_at_start(tmp_path: Path, settings: dict[str, Any], says: str) -> None:
    checkpoint = write_transformers_checkpoint(tmp_path, "qwen3_5_text", **model_variants()["qwen3_5_text"][0])
    options = {"device": "cpu", "kv_cache_bytes": 16 << 20, "max_model_len": 1024, **settings}
    config = MeshConfig(model=str(checkpoint), worker=WorkerConfig(**options))
    if says:
        with pytest.raises(ConfigError, match=says):
            build_engine(config, 1)
    else:
        engine = build_engine(config, 1)
        assert engine.kv.frames is not None
        assert engine.kv.layout.block_size == 128


def test_ranks_and_stages_free_kv_behind_windows() -> None:
    degrees = PoolConfig(tensor_parallel_size=2, pipeline_parallel_size=2)
    assert frees_behind_windows(MeshConfig(prefill=degrees))


TERMS = "a_s=0.006, b_s=1.5e-4, decode_a_s=0.004, decode_s=2e-4, mixed_a_s=0.006, interference_s=1e-4"


def test_the_stand_in_takes_the_time_that_a_model_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evenly over its layers; as an engine with a model it is timed when it starts, and learnt from."""
    slept: list[float] = []
    clock = SimpleNamespace(sleep=slept.append, perf_counter=lambda: sum(slept))
    monkeypatch.setattr(fake, "time", clock)
    config = MeshConfig(worker=WorkerConfig(engine="fake", fake_latency=TERMS))
    engine = build_engine(config, 1)
    for shape in (
        StepShape((ChunkShape(64, 0),), 0, 0),
        StepShape((), 32, 32 * 100),
        StepShape((ChunkShape(64, 128),), 32, 32 * 100),
    ):
        slept.clear()
        step_s(engine, shape)
        assert len(slept) == 1  # nobody looks between its layers
        assert sum(slept) == pytest.approx(parse_latency(TERMS).step_s(shape))
    assert engine_facts(config).num_parameters > 0
    slept.clear()
    timeless = MeshConfig(worker=WorkerConfig(engine="fake"))
    step_s(build_engine(timeless, 1), StepShape((ChunkShape(64, 0),), 0, 0))
    assert slept == []
    assert engine_facts(timeless) == EngineFacts()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a_s=fast", "'fast'"),
        ("a_s=-1", "0 or more"),
        ("a_s=nan", "0 or more"),
        ("gamma=1", "'gamma' is not a term"),
        ("a_s=1,", "'' is not a term"),
        ("abacus", "'abacus'"),
    ],
)
def test_what_is_no_latency_model_is_said_in_a_sentence(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build_engine(MeshConfig(worker=WorkerConfig(engine="fake", fake_latency=text)), 1)


def test_an_engine_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdmesh.extensions.entry_points", lambda **_: ())
    for check in (check_settings, lambda config: build_engine(config, 1)):
        with pytest.raises(ConfigError, match=r"worker\.engine is fake, which is not installed: run `pip install"):
            check(MeshConfig(worker=WorkerConfig(engine="fake")))


def test_a_profile_can_be_the_stand_ins() -> None:
    assert parse_latency("h100-llama3-8b") is PROFILES["h100-llama3-8b"]


def test_dummy_weights_need_no_files_of_weights(tmp_path: Path) -> None:
    write_config(tmp_path, shape=TINY, dtype="float32")
    worker = WorkerConfig(device="cpu", kv_cache_bytes=1 << 20)
    with pytest.raises(ConfigError, match="safetensors"):
        build_engine(MeshConfig(model=str(tmp_path), worker=worker), 1)
    engine = build_engine(MeshConfig(model=str(tmp_path), worker=replace(worker, load_format="dummy")), 1)
    assert engine.max_model_len == TINY.max_position_embeddings


@pytest.mark.parametrize("degrees", [InstanceDegrees(2, 1), InstanceDegrees(1, 2)])
def test_ranks_on_a_device_are_refused_in_a_sentence(degrees: InstanceDegrees) -> None:
    with pytest.raises(ConfigError, match=r"computes on CPUs only so far: set worker\.device to cpu"):
        check_ranks_can_compute(MeshConfig(worker=WorkerConfig(device="cuda")), degrees)
