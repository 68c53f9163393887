"""A mesh of real processes whose instances share a device."""

from __future__ import annotations

import os
import random
import re
import signal
from pathlib import Path

import anyio
import pytest

from pdmesh_testing.checkpoints import TINY, write_checkpoint
from pdmesh_testing.devices import DEVICE, MARKS
from pdmesh_testing.exactness import complete, mismatches, random_prompts, reference
from pdmesh_testing.mesh import RunningMesh, running_mesh

pytestmark = [*MARKS, pytest.mark.anyio, pytest.mark.e2e, pytest.mark.timeout(600)]

CHUNK_TOKENS = 128
MAX_TOKENS = 16
SETTINGS = {"WORKER_DEVICE": DEVICE, "WORKER_KV_CACHE_BYTES": str(256 << 20)}


async def test_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    """In fp32, with prompts of several chunks; KV moves from one process's device memory to another's."""
    checkpoint = write_checkpoint(tmp_path / "model", seed=1)
    prompts = random_prompts([1, 17, CHUNK_TOKENS, CHUNK_TOKENS + 1, 700, 3000], TINY.vocab_size, seed=7)
    references = [reference(checkpoint, prompt, MAX_TOKENS) for prompt in prompts]
    settings = {**SETTINGS, "SCHEDULER_BUNDLE": "fcfs", "POLICY_CHUNK_TOKENS": str(CHUNK_TOKENS)}
    with running_mesh(tmp_path, model=checkpoint, settings=settings) as mesh:
        async with mesh.client() as client:
            found = await mismatches(client, mesh.model, references, concurrency=1)
            found += await mismatches(client, mesh.model, references * 2, concurrency=12)
        assert not found, "\n".join([*found, log_tails(mesh)])
        await anyio.to_thread.run_sync(mesh.wait_until_idle)


async def test_an_instance_may_die_while_its_kv_is_read(tmp_path: Path) -> None:
    """Its memory is mapped into the one that decodes, which goes on, and so do all requests."""
    checkpoint = write_checkpoint(tmp_path / "model", seed=1)
    prompts = random_prompts([1500, 3000] * 6, TINY.vocab_size, seed=8)
    references = [reference(checkpoint, prompt, MAX_TOKENS) for prompt in prompts]
    settings = {**SETTINGS, "SCHEDULER_BUNDLE": "fcfs", "POLICY_CHUNK_TOKENS": str(CHUNK_TOKENS)}
    with running_mesh(tmp_path, model=checkpoint, settings=settings) as mesh:
        found: list[str] = []
        decodes = mesh.pids()["decode-0"]
        answered = anyio.Event()
        async with mesh.client() as client, anyio.create_task_group() as tasks:

            async def ask() -> None:
                found.extend(await mismatches(client, mesh.model, references * 3, concurrency=12))
                answered.set()

            tasks.start_soon(ask)
            for delay_s in (0.3, 0.5):
                await anyio.sleep(delay_s)
                pid = mesh.pids()["prefill-0"]
                assert not answered.is_set(), "nothing was under way: ask for more"
                os.kill(pid, signal.SIGKILL)
                await anyio.to_thread.run_sync(mesh.wait_until_replaced, "prefill-0", pid)
        assert not found, "\n".join([*found, log_tails(mesh)])
        assert mesh.pids()["decode-0"] == decodes
        assert mesh.peer_read_bytes() > 0
        await anyio.to_thread.run_sync(mesh.wait_until_idle)


async def test_graphs_and_flashinfer_serve_and_keep_no_block(tmp_path: Path) -> None:
    """In bf16 with heads that FlashInfer takes; under the default bundle, prompts long and short at once.

    Some answers are held to a grammar.
    """
    checkpoint = write_checkpoint(tmp_path / "model", dtype="bfloat16", head_dim=128, seed=2)
    rng = random.Random(3)
    prompts = random_prompts([rng.choice([5, 60, 400, 3000]) for _ in range(20)], TINY.vocab_size, seed=4)
    lengths: list[int] = []
    with running_mesh(tmp_path, model=checkpoint, settings=SETTINGS) as mesh:
        async with mesh.client() as client:

            async def ask(prompt: list[int]) -> None:
                answer = await complete(client, mesh.model, prompt, MAX_TOKENS)
                lengths.append(len(answer.token_ids))

            async def ask_for_digits(prompt: list[int]) -> None:
                fields = {"structured_outputs": {"regex": "[0-9]{12}"}, "ignore_eos": False, "temperature": 1.0}
                answer = await complete(client, mesh.model, [*prompt, 5, 6, 7], MAX_TOKENS, **fields)
                assert re.fullmatch("[0-9]{12}", answer.text)

            try:
                async with anyio.create_task_group() as tasks:
                    for prompt in prompts:
                        tasks.start_soon(ask, prompt)
                    for prompt in prompts[::4]:
                        tasks.start_soon(ask_for_digits, prompt)
            except* Exception as errors:
                pytest.fail(f"{errors.exceptions}\n{log_tails(mesh)}")
        assert lengths == [MAX_TOKENS] * len(prompts)
        await anyio.to_thread.run_sync(mesh.wait_until_idle)


def log_tails(mesh: RunningMesh) -> str:
    """The ends of the services' logs: all of it would push the failure out of sight."""
    return "\n".join(f"== {file.name}\n{file.read_text()[-2000:]}" for file in sorted(mesh.folder.glob("*.log")))
