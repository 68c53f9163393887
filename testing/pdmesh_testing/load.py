"""A continuous load while a mesh is changed: streams of the `openai` client, compared with undisturbed output."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count

import openai

from pdmesh_testing.checkpoints import TINY
from pdmesh_testing.exactness import random_prompts

#: No stream may take longer: it is lost.
STREAM_LIMIT_S = 240.0


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A request that is answered in the same way whenever it is asked."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int


@dataclass(slots=True)
class Stream:
    """A stream with its request, tokens and end."""

    asked: LoadRequest
    began_s: float
    token_ids: list[int] = field(default_factory=list[int])
    #: Times of the events, each with one token or more.
    token_times_s: list[float] = field(default_factory=list[float])
    error: str | None = None
    ended_s: float | None = None


@dataclass(slots=True)
class StreamLoad:
    """Load that keeps a number of streams open all the time."""

    undisturbed: dict[LoadRequest, list[int]]
    #: Ended streams.
    streams: list[Stream] = field(default_factory=list[Stream])
    #: Running streams.
    open: list[Stream] = field(default_factory=list[Stream])
    #: Set this event to begin no more streams.
    over: asyncio.Event = field(default_factory=asyncio.Event)
    #: Set when a stream has ended, or had its first token.
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def failed(self) -> list[str]:
        return [each.error for each in self.streams if each.error is not None]

    @property
    def differ(self) -> list[str]:
        """Return descriptions of the ended streams without an error whose tokens differ from the undisturbed ones."""
        return [
            f"{each.asked.max_tokens} tokens after {len(each.asked.prompt)}: {len(each.token_ids)} came"
            for each in self.streams
            if each.error is None and each.token_ids != self.undisturbed[each.asked]
        ]

    def end(self, stream: Stream) -> None:
        """Note that a stream has ended, however it went."""
        self.open.remove(stream)
        self.streams.append(stream)
        self.tell()

    def tell(self) -> None:
        """Wake the waiters, because a stream has its first token, or has ended."""
        self._news.set()
        self._news = asyncio.Event()

    async def ended(self, number: int) -> None:
        """Wait until ``number`` more streams have ended. Raises TimeoutError."""
        number += len(self.streams)
        async with asyncio.timeout(STREAM_LIMIT_S):
            while len(self.streams) < number:
                await self._news.wait()

    async def all_draw(self, number: int) -> None:
        """Wait until ``number`` streams are open, each with a token. Raises TimeoutError."""
        async with asyncio.timeout(STREAM_LIMIT_S):
            while len(self.open) < number or not all(stream.token_ids for stream in self.open):
                await self._news.wait()

    def num_tokens(self, begin_s: float, end_s: float) -> int:
        """Return how many events with tokens came in between, on the clock of `time.monotonic`."""
        return sum(begin_s <= at_s < end_s for each in self.streams for at_s in each.token_times_s)


def requests_of(seed: int, lengths: Sequence[int], max_tokens: int) -> list[LoadRequest]:
    """Return one request for each prompt length. Every second one has a temperature, and a seed."""
    prompts = random_prompts(list(lengths), TINY.vocab_size, seed=seed)
    return [
        LoadRequest(tuple(prompt), max_tokens, temperature=0.8 * (index % 2), seed=seed + index)
        for index, prompt in enumerate(prompts)
    ]


async def follow(
    client: openai.AsyncOpenAI, model: str, stream: Stream, on_first: Callable[[], None] = lambda: None
) -> Stream:
    """Run a stream to its end, and record tokens, times and error in it. ``on_first`` is called at the first token."""
    asked = stream.asked
    try:
        async with asyncio.timeout(STREAM_LIMIT_S):
            events = await client.completions.create(
                model=model,
                prompt=list(asked.prompt),
                max_tokens=asked.max_tokens,
                temperature=asked.temperature,
                seed=asked.seed,
                stream=True,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            finished = False
            async for event in events:
                for choice in event.choices:
                    token_ids = getattr(choice, "token_ids", None) or []
                    stream.token_ids += token_ids
                    finished = finished or choice.finish_reason is not None
                    if token_ids:
                        stream.token_times_s.append(time.monotonic())
                        if len(stream.token_times_s) == 1:
                            on_first()
            if not finished:
                stream.error = "the stream ended early"
    except Exception as error:
        # Errors of the client, or of a broken connection below it.
        stream.error = f"{error!r} after {len(stream.token_ids)} tokens"
    stream.ended_s = time.monotonic()
    return stream


@asynccontextmanager
async def running_load(
    base_url: str,
    model: str,
    requests: Sequence[LoadRequest],
    *,
    at_once: int,
    api_key: str = "none",
    max_retries: int = openai.DEFAULT_MAX_RETRIES,
) -> AsyncGenerator[StreamLoad]:
    """Ask each once, then keep ``at_once`` streams running until the block is left; they end then.

    A request that is refused before its answer begins is sent again, up to ``max_retries`` times.
    """
    async with openai.AsyncOpenAI(
        base_url=f"{base_url}/v1", api_key=api_key, timeout=600, max_retries=max_retries
    ) as client:
        first = [await follow(client, model, Stream(asked, time.monotonic())) for asked in requests]
        broken = [each.error for each in first if each.error is not None]
        if broken:
            raise RuntimeError(f"undisturbed requests fail: {broken[0]}")
        load, numbers = StreamLoad({each.asked: each.token_ids for each in first}), count()

        async def keep_asking() -> None:
            while not load.over.is_set():
                stream = Stream(requests[next(numbers) % len(requests)], time.monotonic())
                load.open.append(stream)
                await follow(client, model, stream, load.tell)
                load.end(stream)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(at_once):
                tasks.create_task(keep_asking())
            try:
                yield load
            finally:
                load.over.set()
