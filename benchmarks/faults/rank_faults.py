"""Single ranks of instances are killed or stopped at random, and prompts answered beside it: what is lost or left?

A mesh for each layout, with random weights. For each fault all prompts are asked at once; then one process of an
instance that has several is killed, or, unless it is the leader, stopped. Every answer is compared with that of
`transformers`: tokens, and log-probabilities to 1e-4. Each process of the instance must end, all blocks be free, and
another instance take its place. Every round without a fault counts for exactness, too.

Exit code 1 if an answer is lost or differs, an instance hangs, blocks leak or a process is left behind.

    python -m benchmarks.faults.rank_faults [--faults 4] [--architectures llama,qwen3] [--layouts 2x1-1x1,...]
        [--seed 1] [--max-kv-tokens 256]

With ``--faults 0`` each layout answers all prompts once. Prompts are computed in chunks of 128, several at a time. With
``--max-kv-tokens`` contexts are spread over as many decode instances as the longest one needs.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import anyio
import httpx

from benchmarks.exactness.exactness import checkpoint_of
from benchmarks.harness.report import heading
from pdmesh.cli.process_id import process_id, wait_for_end
from pdmesh.errors import InstanceUnavailable
from pdmesh_testing.checkpoints import TINY
from pdmesh_testing.exactness import Reference, mismatches, random_prompts, reference
from pdmesh_testing.mesh import RunningMesh, layout_settings, running_mesh

#: Degrees of prefill and of decode, tensor x stages.
DEFAULT_LAYOUTS = "1x2-1x1,2x2-1x1,1x1-1x2,2x1-1x2,2x1-1x1"
PROMPT_LENGTHS = (1, 15, 16, 17, 33, 100, 257, 700)
MAX_TOKENS = 60
SETTINGS = {"POLICY_PREFILL_STEP_S": "0.02", "WORKER_NUM_THREADS": "1"}
END_LIMIT_S = 15.0
REPLACED_LIMIT_S = 180.0
ANSWER_LIMIT_S = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=4, help="in each mesh")
    parser.add_argument("--architectures", default="llama,qwen3")
    parser.add_argument("--layouts", default=DEFAULT_LAYOUTS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-kv-tokens", type=int, default=0, help="of a context on an instance; 0: no limit")
    arguments = parser.parse_args()
    print(heading("Faults of single ranks"), flush=True)
    rng, counts = random.Random(arguments.seed), Counter[str]()
    for architecture in arguments.architectures.split(","):
        with tempfile.TemporaryDirectory() as name:
            checkpoint = checkpoint_of(architecture, Path(name) / "model")
            prompts = random_prompts(PROMPT_LENGTHS, TINY.vocab_size, seed=arguments.seed)
            references = [reference(checkpoint, prompt, MAX_TOKENS) for prompt in prompts]
            for layout in arguments.layouts.split(","):
                before = counts.copy()
                limit = arguments.max_kv_tokens
                _in_a_mesh(Path(name) / layout, checkpoint, layout, references, arguments.faults, limit, rng, counts)
                print(f"{architecture} {layout}: {_said(counts - before)}", flush=True)
    print(f"in all: {_said(counts)}")
    return int(any(counts[what] for what in ("lost", "differ", "hang", "leaked", "left behind", "not replaced")))


def _said(counts: Counter[str]) -> str:
    return ", ".join(f"{what} {number}" for what, number in sorted(counts.items()))


def _in_a_mesh(
    folder: Path,
    checkpoint: Path,
    layout: str,
    references: list[Reference],
    num_faults: int,
    max_kv_tokens: int,
    rng: random.Random,
    counts: Counter[str],
) -> None:
    settings = layout_settings(layout) | SETTINGS | {"WORKER_MAX_KV_TOKENS_PER_INSTANCE": str(max_kv_tokens)}
    longest = max(PROMPT_LENGTHS) + MAX_TOKENS
    num_decode = -(-longest // max_kv_tokens) if max_kv_tokens else 1
    folder.mkdir()
    pids: set[int] = set()
    with running_mesh(folder, model=checkpoint, decode=num_decode, settings=settings) as mesh:
        for number in range(num_faults + 1):
            anyio.run(_round, mesh, references, number > 0, rng, counts)
            pids.update(pid for ranks in anyio.run(_ranks, mesh) for pid in ranks)
        if max_kv_tokens:
            counts["answers of members"] += int(mesh.total("kv_part_answers"))
    counts["left behind"] += sum(process_id(pid) is not None for pid in pids)


async def _round(
    mesh: RunningMesh, references: list[Reference], has_fault: bool, rng: random.Random, counts: Counter[str]
) -> None:
    """Ask for all answers, and do something to a rank meanwhile."""

    async def ask() -> None:
        async with mesh.client() as client, anyio.create_task_group() as asking:
            for expected in references:
                asking.start_soon(ask_one, client, expected)

    async def ask_one(client: httpx.AsyncClient, expected: Reference) -> None:
        counts["answers"] += 1
        try:
            counts["differ"] += len(await mismatches(client, mesh.model, [expected], concurrency=1))
        except* httpx.HTTPError:
            counts["lost"] += 1

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        if has_fault:
            await anyio.sleep(rng.uniform(0.05, 1.5))
            await _fault(mesh, rng, counts)
    try:
        await anyio.to_thread.run_sync(lambda: mesh.wait_until_idle(60.0))
    except TimeoutError:
        counts["leaked"] += 1


async def _fault(mesh: RunningMesh, rng: random.Random, counts: Counter[str]) -> None:
    instances = await _ranks(mesh)
    pids = rng.choice(instances)
    victim = rng.choice(pids)
    number = signal.SIGKILL if victim == pids[0] else rng.choice([signal.SIGKILL, signal.SIGSTOP])
    os.kill(victim, number)
    counts[f"faults, {number.name}"] += 1
    for pid in pids:
        process = process_id(pid)
        if process is not None and not await anyio.to_thread.run_sync(wait_for_end, process, END_LIMIT_S):
            counts["hang"] += 1
    deadline_s = time.monotonic() + REPLACED_LIMIT_S
    while sum(not set(others) & set(pids) for others in await _ranks(mesh)) < len(instances):
        if time.monotonic() > deadline_s:
            counts["not replaced"] += 1
            return
        await anyio.sleep(0.3)


async def _ranks(mesh: RunningMesh) -> list[list[int]]:
    """The processes of each instance that has several. A scheduler that gets no time to answer is asked again."""
    with anyio.fail_after(ANSWER_LIMIT_S):
        while True:
            with suppress(InstanceUnavailable):
                return [list(row.rank_pids) for row in (await mesh.state()).instances if row.rank_pids]
            await anyio.sleep(0.3)


if __name__ == "__main__":
    sys.exit(main())
