"""Whether a mesh says what the reference says: greedy tokens and log-probabilities against `transformers`.

Used by the end-to-end tests on a few meshes, and by ``benchmarks/exactness/exactness.py`` on the whole matrix.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import anyio
import httpx

from pdmesh.engine.runner import TorchEngine
from pdmesh.model import SamplingParams
from pdmesh_testing.reference import HfReference
from pdmesh_testing.stepping import generate


@dataclass(frozen=True, slots=True)
class Reference:
    """Greedy output after a prompt, of `transformers` in fp32, or of one engine alone in another dtype."""

    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    #: Log-probabilities of the generated tokens.
    logprobs: tuple[float, ...]
    #: Smallest difference of the two largest logits, over all steps.
    smallest_margin: float


@lru_cache(maxsize=4)
def _load(checkpoint: Path) -> HfReference:
    return HfReference(checkpoint)


def reference(checkpoint: Path, prompt: Sequence[int], max_tokens: int) -> Reference:
    """Return greedy output of `transformers`, never stopping at an end-of-sequence token."""
    steps = _load(checkpoint).greedy_steps(prompt, max_tokens)
    return Reference(
        tuple(prompt),
        tuple(step.token_id for step in steps),
        tuple(step.logprob for step in steps),
        min(step.margin for step in steps),
    )


def engine_reference(engine: TorchEngine, prompt: Sequence[int], max_tokens: int) -> Reference:
    """Return greedy output of an engine that computes nothing else."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=2)
    done = generate(engine, prompt, max_tokens, params=params)
    drawn = [drawn.logprobs for result in done.results for drawn in result.drawn]
    logprobs = [each for each in drawn if each is not None]
    return Reference(
        tuple(prompt),
        tuple(done.output_ids),
        tuple(each.logprob for each in logprobs),
        min(each.top[0][1] - each.top[1][1] for each in logprobs),
    )


def random_prompts(lengths: Sequence[int], vocab_size: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion as a client received it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str


async def complete(
    client: httpx.AsyncClient, model: str, prompt: Sequence[int], max_tokens: int, **fields: Any
) -> Answer:
    """Ask for a greedy completion of a token-id prompt without streaming, and return the answer."""
    response = await client.post(
        "/v1/completions",
        json={
            "model": model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "return_token_ids": True,
            "logprobs": 1,
            "temperature": 0,
            **fields,
        },
        timeout=600,
    )
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return Answer(tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"]), choice["text"])


class StreamFailed(Exception):
    """A stream was refused, or ended early or with an error."""


async def streamed(
    client: httpx.AsyncClient,
    model: str,
    prompt: Sequence[int],
    max_tokens: int,
    on_tokens: Callable[[list[int]], object] = lambda _: None,
) -> list[int]:
    """Return the token ids of a streamed greedy completion; call ``on_tokens`` with all of them after each event.

    Raises StreamFailed, and what the client raises where the connection breaks.
    """
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    token_ids: list[int] = []
    last = ""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise StreamFailed((await response.aread()).decode())
        async for line in response.aiter_lines():
            last = line or last
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise StreamFailed(str(event["error"]))
                for choice in event["choices"]:
                    token_ids += choice["token_ids"]
                on_tokens(token_ids)
    if last != "data: [DONE]":
        raise StreamFailed("the stream ended early")
    return token_ids


async def streamed_while(
    client: httpx.AsyncClient,
    model: str,
    references: Sequence[Reference],
    disturb: Callable[[], object],
    *,
    num_begun: int,
) -> list[list[int]]:
    """Stream all references at once, ``disturb`` when the first ``num_begun`` have begun, and return the token ids."""
    got = [list[int]() for _ in references]
    begun = [anyio.Event() for _ in references]

    async def run(index: int) -> None:
        prompt, num_tokens = references[index].prompt, len(references[index].token_ids)
        got[index] = await streamed(client, model, prompt, num_tokens, lambda _: begun[index].set())

    async with anyio.create_task_group() as tasks:
        for index in range(len(references)):
            tasks.start_soon(run, index)
        for event in begun[:num_begun]:
            await event.wait()
        disturb()
    return got


async def mismatches(
    client: httpx.AsyncClient,
    model: str,
    references: Sequence[Reference],
    *,
    concurrency: int,
    tolerance: float = 1e-4,
) -> list[str]:
    """Ask for every reference, ``concurrency`` at a time; a sentence a difference.

    Tokens must be equal, and log-probabilities to ``tolerance``.
    """
    found: list[str] = []
    limiter = anyio.CapacityLimiter(concurrency)

    async def check(expected: Reference) -> None:
        async with limiter:
            got = await complete(client, model, expected.prompt, len(expected.token_ids))
        where = f"prompt of {len(expected.prompt)} tokens (margin {expected.smallest_margin:.1e})"
        if got.token_ids != expected.token_ids:
            first = next(
                (i for i, (a, b) in enumerate(zip(got.token_ids, expected.token_ids, strict=False)) if a != b), None
            )
            found.append(f"{where}: tokens differ from index {first}: {got.token_ids} != {expected.token_ids}")
        else:
            worst = max(abs(a - b) for a, b in zip(got.logprobs, expected.logprobs, strict=True))
            if worst > tolerance:
                found.append(f"{where}: logprobs differ by {worst:.1e}")

    async with anyio.create_task_group() as tasks:
        for expected in references:
            tasks.start_soon(check, expected)
    return found
