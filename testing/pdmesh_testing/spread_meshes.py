"""What end-to-end tests ask of meshes whose contexts are spread, and of instances that have several processes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import anyio

from pdmesh.cli.process_id import process_id, wait_for_end
from pdmesh_testing.checkpoints import TINY
from pdmesh_testing.exactness import Reference, random_prompts, reference
from pdmesh_testing.mesh import PATIENT, RunningMesh, running_mesh


@dataclass(frozen=True, slots=True)
class Served:
    """A mesh, and what ``transformers`` answers to some prompts."""

    mesh: RunningMesh
    references: list[Reference]


def spread_settings(limit: int, *, room: int = 0, block_size: int = 0, block_bytes: int = 0) -> dict[str, str]:
    """Return the settings of a mesh whose contexts are spread in ranges of ``limit`` tokens.

    Each instance has room for ``room`` tokens, in blocks of ``block_bytes``; with 0 the default room.
    """
    settings = {**PATIENT, "WORKER_MAX_KV_TOKENS_PER_INSTANCE": str(limit), "POLICY_CHUNK_TOKENS": "48"}
    if room:
        settings["WORKER_BLOCK_SIZE"] = str(block_size)
        settings["WORKER_KV_CACHE_BYTES"] = str(room // block_size * block_bytes)
    return settings


@contextmanager
def serving_spread(
    folder: Path,
    checkpoint: Path,
    limit: int,
    prompt_lengths: Sequence[int],
    max_tokens: int,
    *,
    decode: int,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Served]:
    """Serve a checkpoint of `TINY`, with contexts that are spread in ranges of ``limit`` tokens."""
    prompts = random_prompts(prompt_lengths, TINY.vocab_size, seed=2)
    references = [reference(checkpoint, prompt, max_tokens) for prompt in prompts]
    with running_mesh(folder, model=checkpoint, decode=decode, settings={**spread_settings(limit), **settings}) as mesh:
        yield Served(mesh, references)


def answers(mesh: RunningMesh) -> dict[str, float]:
    """Return how many questions about its ranges each instance has answered."""
    return _counted(mesh, "kv_part_answers")


def recomputed(mesh: RunningMesh) -> dict[str, float]:
    """Return how many tokens of lost ranges each instance has computed again."""
    return _counted(mesh, "kv_part_recomputed_tokens")


def _counted(mesh: RunningMesh, name: str) -> dict[str, float]:
    found = {
        service: re.search(rf"^pdmesh:{name}_total (\S+)$", text, re.M) for service, text in mesh.metrics().items()
    }
    return {service: float(each[1]) for service, each in found.items() if each}


def since(before: Mapping[str, float], now: Mapping[str, float]) -> list[str]:
    """Return the instances with more answers in ``now`` than in ``before``."""
    return [name for name, number in now.items() if number > before.get(name, 0)]


async def until(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    """Wait until something is so in other processes."""
    with anyio.fail_after(limit_s):
        while not await anyio.to_thread.run_sync(condition):  # noqa: ASYNC110
            await anyio.sleep(0.005)


async def until_ended(pids: Iterable[int], limit_s: float = 10.0) -> None:
    """Wait until none of these processes is there."""
    for pid in pids:
        if (process := process_id(pid)) is not None:
            assert await anyio.to_thread.run_sync(wait_for_end, process, limit_s), f"{pid} goes on"
