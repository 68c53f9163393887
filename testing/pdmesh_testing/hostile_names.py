"""Times to first tokens of one key's conversations beside a key that names sessions in hostile ways.

    python -m pdmesh_testing.hostile_names [--rounds 3] [--seconds 20]

Both keys load one mixed instance with the stand-in engine. In every other round, the hostile key's requests have a new
name each, endless children of one parent, leases of an hour, and names of a megabyte. In the others, the same requests
name no session. The hostile key's contexts exceed the cache in both.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import anyio
import httpx

from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh_testing.configured_fake import TIMED_LAYOUT
from pdmesh_testing.live_agents import VOCABULARY, Turn, quantile_s, stream_turn
from pdmesh_testing.mesh import running_mesh

#: 20,000 prompt tokens a second.
LATENCY = "a_s=0.01,b_s=5e-5,decode_a_s=0.01"
CACHED_TOKENS = 60_000

#: Conversations of the other key: their turns add tokens, and the first turn of the next conversation begins anew.
NUM_CONVERSATIONS, NUM_TURNS, FIRST_TOKENS, NEXT_TOKENS, ANSWER_TOKENS, PAUSE_S = 6, 15, 1000, 200, 16, 0.5

#: Hostile requests before the first round, and in each second of a round.
NUM_BEFORE, RATE, HOSTILE_TOKENS = 512, 8, 140

_NAME_BYTES = 1 << 20


def hostile_names(number: int) -> tuple[dict[str, str], dict[str, object]]:
    """Return headers and fields of a hostile request."""
    fields: dict[str, object] = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    match number % 4:
        case 0:
            return {"x-session-id": f"child {number}", "x-parent-session-id": "parent"}, fields
        case 1:
            return {}, fields | {"prompt_cache_key": f"{number}".ljust(_NAME_BYTES, "x")}
        case _:
            return {"x-session-id": f"new {number}"}, fields


class Load:
    """The two keys' clients. ``rng`` draws all prompts."""

    def __init__(self, ours: httpx.AsyncClient, hostile: httpx.AsyncClient) -> None:
        ours.headers["authorization"], hostile.headers["authorization"] = "Bearer ours", "Bearer hostile"
        self._ours = ours
        self._hostile = hostile
        self._rng = random.Random(0)
        self._numbers = itertools.count()

    def _prompt(self, num_tokens: int) -> list[int]:
        return self._rng.choices(range(VOCABULARY), k=num_tokens)

    async def hostile(self, *, is_named: bool) -> None:
        """Send one hostile request."""
        headers, fields = hostile_names(next(self._numbers)) if is_named else ({}, {})
        await stream_turn(self._hostile, self._prompt(HOSTILE_TOKENS), 1, headers, **fields)

    async def hostile_before(self, number: int) -> None:
        """Send named hostile requests, eight at a time."""
        left = iter(range(number))

        async def worker(left: Iterator[int]) -> None:
            for _ in left:
                await self.hostile(is_named=True)

        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(worker, left)

    async def round(self, seconds: float, *, is_named: bool) -> list[Turn]:
        """Return the turns of the other key in a round."""
        turns: list[Turn] = []
        end_s = anyio.current_time() + seconds

        async def converse() -> None:
            while anyio.current_time() < end_s:
                prompt, name = self._prompt(FIRST_TOKENS), f"ours {next(self._numbers)}"
                for _ in range(NUM_TURNS):
                    if anyio.current_time() >= end_s:
                        break
                    turns.append(await stream_turn(self._ours, prompt, ANSWER_TOKENS, {"x-session-id": name}))
                    prompt += self._prompt(NEXT_TOKENS)
                    await anyio.sleep(PAUSE_S)
                await self._ours.delete(f"/v1/sessions/{name}")

        async with anyio.create_task_group() as tasks:
            for _ in range(NUM_CONVERSATIONS):
                tasks.start_soon(converse)
            for number in range(round(seconds * RATE)):
                tasks.start_soon(self._later, end_s - seconds + number / RATE, is_named)
        return turns

    async def _later(self, at_s: float, is_named: bool) -> None:
        await anyio.sleep_until(at_s)
        await self.hostile(is_named=is_named)


def num_lost(turns: Sequence[Turn]) -> int:
    """Return how many turns did not find the KV of the turn before."""
    possible = [turn.num_prompt_tokens - NEXT_TOKENS - 2 * GRANULE_TOKENS for turn in turns]
    return sum(
        turn.num_prompt_tokens > FIRST_TOKENS and turn.num_cached_tokens < least
        for turn, least in zip(turns, possible, strict=True)
    )


def settings(folder: Path) -> dict[str, str]:
    """Return the settings of the mesh, with two keys in a file."""
    keys = folder / "keys"
    keys.write_text("ours\nhostile\n")
    return {
        "WORKER_ENGINE": "fake",
        "WORKER_FAKE_LATENCY": LATENCY,
        "WORKER_KV_CACHE_BYTES": str(CACHED_TOKENS * TIMED_LAYOUT.token_bytes),
        "SECURITY_API_KEYS_FILE": str(keys),
    }


async def measure(ours: httpx.AsyncClient, hostile: httpx.AsyncClient, rounds: int, seconds: float) -> None:
    """Print the figures of rounds without and with hostile names, in turns."""
    load = Load(ours, hostile)
    turns: dict[bool, list[Turn]] = {False: [], True: []}
    await load.hostile_before(NUM_BEFORE)
    for number in range(2 * rounds):
        turns[number % 2 == 1] += await load.round(seconds, is_named=number % 2 == 1)
    for is_named, found in turns.items():
        kind = "hostile names" if is_named else "no names"
        sys.stdout.write(f"{kind}: {len(found)} turns, {num_lost(found)} without the KV before\n")
    for share in (0.5, 0.9, 0.99):
        named_s, plain_s = (quantile_s(turns[kind], share) for kind in (True, False))
        sys.stdout.write(
            f"TTFT p{100 * share:.0f}: {1e3 * named_s:.0f} over {1e3 * plain_s:.0f} ms: {named_s / plain_s:.3f} x\n"
        )


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()

    async def run() -> None:
        async with mesh.client() as ours, mesh.client() as hostile:
            await measure(ours, hostile, options.rounds, options.seconds)

    with tempfile.TemporaryDirectory() as folder:
        own = settings(Path(folder))
        with running_mesh(Path(folder), model=None, prefill=0, decode=0, mixed=1, settings=own) as mesh:
            anyio.run(run)


if __name__ == "__main__":
    main()
