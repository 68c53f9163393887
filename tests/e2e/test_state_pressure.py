"""Models with states under memory pressure, with room for one cached state: bits equal an engine's alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pdmesh.config import WorkerConfig
from pdmesh.engine.files import load_model_config
from pdmesh.engine.runner import TorchEngine
from pdmesh.kv_layout import cache_bytes
from pdmesh.worker.engines import cache_size_of
from pdmesh.worker.state_frames import num_held_frames, state_room
from pdmesh_testing.exactness import engine_reference, mismatches, random_prompts
from pdmesh_testing.mesh import running_mesh
from pdmesh_testing.transformers_checkpoints import model_variants, write_transformers_checkpoint

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.ucx, pytest.mark.slow, pytest.mark.timeout(600)]

MAX_NUM_SEQS, NUM_BLOCKS, BLOCK = 3, 10, 128


async def test_one_cached_state_and_ten_blocks_change_no_bit(tmp_path: Path) -> None:
    """Conversations of 250 to 660 tokens share caches of 1,280 to 1,536 tokens, so states are evicted."""
    variant = model_variants()["qwen3_5_text"][0]
    checkpoint = write_transformers_checkpoint(tmp_path / "model", "qwen3_5_text", seed=1, **variant)
    config = load_model_config(checkpoint)
    layout = config.kv_layout(dtype="float32", block_size=BLOCK, frees_windows=True)
    num_bytes = cache_bytes(layout, NUM_BLOCKS, num_held_frames(layout, MAX_NUM_SEQS) + 1)
    worker = WorkerConfig(kv_cache_bytes=num_bytes, max_num_seqs=MAX_NUM_SEQS, cached_states_share=0.0)
    size = cache_size_of(worker, layout, free_bytes=None, max_model_len=1024, max_frames=1)
    assert state_room(layout, size, MAX_NUM_SEQS, 0.0).num_cached == 1
    assert size.num_blocks <= NUM_BLOCKS + 2
    engine = TorchEngine(
        checkpoint,
        num_blocks=8,
        block_size=BLOCK,
        dtype="float32",
        device="cpu",
        num_threads=1,
        deterministic=True,
        ordered=True,
    )
    prompts = random_prompts([100, 128, 129, 300, 383], config.vocab_size, seed=3)
    asked = [engine_reference(engine, prompt, 150) for prompt in prompts]
    turns = [
        engine_reference(engine, [*each.prompt, *each.token_ids[:num_drawn], *rest], 100)
        for each in asked
        for num_drawn, rest in zip((150, 40), random_prompts([9, 130], config.vocab_size, seed=4), strict=True)
    ]
    settings = {
        "WORKER_KV_CACHE_BYTES": str(num_bytes),
        "WORKER_MAX_NUM_SEQS": str(MAX_NUM_SEQS),
        "WORKER_CACHED_STATES_SHARE": "0",
        "WORKER_MAX_MODEL_LEN": "1024",
        "WORKER_DTYPE": "float32",
        "WORKER_DETERMINISTIC": "true",
        "SCHEDULER_MAX_QUEUE_S": "600",
    }
    with running_mesh(tmp_path, model=checkpoint, prefill=1, decode=2, settings=settings) as mesh:
        async with mesh.client() as client:
            found = await mismatches(client, mesh.model, asked, concurrency=1, tolerance=0.0)
            found += await mismatches(client, mesh.model, [*turns, *asked], concurrency=15, tolerance=0.0)
        assert found == []
        mesh.wait_until_idle()
        logs = mesh.logs()
        assert set(re.findall(r"num_cached_states\W+(\d+)", logs)) == {"1"}
        assert "without a command" not in logs
        assert mesh.total("prefix_cache_hits") > 0
        assert mesh.total("prefix_cache_unseen_tokens") > 0, "no state was missed that had been evicted"
