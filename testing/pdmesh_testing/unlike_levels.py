"""Completions of a mesh whose instances compute at different processor levels of one arithmetic class.

The prefill instance and one decode instance run at one level, and another decode instance at another. Requests are
computed at the first level and decoded at the other, move between the two while they decode, and start again at the
first when the other is killed. Tokens and log-probabilities must equal an engine's alone, to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.to_thread
import httpx

from pdmesh.engine.runner import TorchEngine
from pdmesh.model import Role, SamplingParams
from pdmesh_testing.exactness import Answer, complete
from pdmesh_testing.mesh import RunningMesh, another_worker, running_mesh
from pdmesh_testing.stepping import generate

OTHER = "decode-other"

#: On a busy machine the first stream may have ended before the last one decodes.
NUM_TRIES = 5


class Found(NamedTuple):
    """Outcome of the completions."""

    num_asked: int
    #: Number of decodes that were on the instance as it was drained.
    num_moved: int
    #: Number of decodes that were on the instance as it was killed.
    num_killed: int
    differ: list[str]


def expected_of(
    checkpoint: Path, level: str, prompts: Sequence[Sequence[int]], max_tokens: int, *, dtype: str
) -> list[Answer]:
    """Return the greedy answers of one engine at a level, each prompt alone."""
    engine = TorchEngine(
        checkpoint, num_blocks=256, num_threads=1, device="cpu", dtype=dtype, cpu_level=level, ordered=True
    )
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=1)
    answers: list[Answer] = []
    for prompt in prompts:
        done = generate(engine, prompt, max_tokens, params=params)
        logprobs = tuple(result.logprobs.logprob for result in done.results if result.logprobs is not None)
        answers.append(Answer(tuple(done.output_ids), logprobs, ""))
    return answers


def unlike_levels(
    folder: Path,
    checkpoint: Path,
    levels: tuple[str, str],
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    dtype: str = "bfloat16",
) -> Found:
    """Serve ``prompts`` at ``levels``, the prefill level first, and compare with one engine at the second level."""
    expected = expected_of(checkpoint, levels[1], prompts, max_tokens, dtype=dtype)
    ordered = {"WORKER_DETERMINISTIC": "true", "WORKER_DTYPE": dtype}
    with (
        running_mesh(folder, model=checkpoint, settings={**ordered, "WORKER_CPU_LEVEL": levels[0]}) as mesh,
        another_worker(mesh, checkpoint, Role.DECODE, OTHER, {**ordered, "WORKER_CPU_LEVEL": levels[1]}) as other,
    ):
        classes = {row.arithmetic for row in mesh.status().instances}
        assert len(classes) == 1, f"levels {levels} are of {classes}"

        def move() -> None:
            mesh.pdmesh("undrain", "decode-0")
            mesh.pdmesh("drain", OTHER)

        def kill() -> None:
            mesh.pdmesh("undrain", "decode-0")
            other.kill()

        found = Found(0, 0, 0, [])

        def ask(disturb: Callable[[], None] | None) -> int:
            nonlocal found
            for _ in range(NUM_TRIES):
                num_there, differ = anyio.run(_ask, mesh, prompts, expected, disturb)
                found = found._replace(num_asked=found.num_asked + len(prompts), differ=found.differ + differ)
                if disturb is None or num_there == len(prompts):
                    return num_there
            return 0

        # Prompts are computed at one level and decoded at the other from here on.
        mesh.pdmesh("drain", "decode-0")
        ask(None)
        num_moved = ask(move)
        mesh.pdmesh("undrain", OTHER)
        mesh.pdmesh("drain", "decode-0")
        num_killed = ask(kill)
    return found._replace(num_moved=num_moved, num_killed=num_killed)


async def _ask(
    mesh: RunningMesh, prompts: Sequence[Sequence[int]], expected: Sequence[Answer], disturb: Callable[[], None] | None
) -> tuple[int, list[str]]:
    """Ask for all prompts at once, and disturb the other instance once all decode there, unless one has ended before.

    Returns how many decoded there then, and a sentence for each answer that is not the expected one.
    """
    num_there, num_ended, differ = 0, 0, list[str]()

    async def check(client: httpx.AsyncClient, number: int) -> None:
        nonlocal num_ended
        got = await complete(client, mesh.model, prompts[number], len(expected[number].token_ids))
        num_ended += 1
        how = "undisturbed" if disturb is None else disturb.__name__
        where = f"prompt {number} of {len(prompts[number])} tokens, {how}"
        if got.token_ids != expected[number].token_ids:
            differ.append(f"{where}: tokens differ")
        elif got.logprobs != expected[number].logprobs:
            differ.append(f"{where}: log-probabilities differ")

    async with mesh.client() as client, anyio.create_task_group() as tasks:
        for number in range(len(prompts)):
            tasks.start_soon(check, client, number)
        if disturb is not None:
            while num_there < len(prompts) and not num_ended:
                (num_there,) = [row.num_decoding for row in (await mesh.state()).instances if row.instance_id == OTHER]
            if num_there == len(prompts):
                await anyio.to_thread.run_sync(disturb)
    return num_there, differ
