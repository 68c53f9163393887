"""Turns of a conversation that come back: what of them is computed again, and what others notice of it.

Usage: python -m benchmarks.speed.prefix_turns [--tokens 4096] [--rounds 5] [--part NAME ...]

Real meshes of an 82M bf16 model on this machine, with and without reuse (`gateway.prefix_reuse`) side by side, which
are asked in turns, so that whatever else the machine does is in both figures. Parts:

* ``turns``: a prompt of so many tokens, its answer, and a next turn of 36 tokens more: TTFT over the first turn's, and
  the share of its tokens whose KV was there; on one instance that prefills and one that decodes, and on a mixed one.
* ``offloaded``: the same on a mixed instance whose cache holds two of eight users' conversations, with a tier on a disk
  behind it: by a user's next turn the others have taken its place.
* ``tool-call``: turns after pauses of 30 s in which others fill that cache, over turns whose KV stayed; with a name, so
  that KV is loaded before the turn, and without. All turns compute as many tokens.
* ``cold``: prompts that never repeat: TTFT, and tokens a second of prompt and answer, over those without reuse. Caches
  hold four of them, and are full: what is kept is given up for what comes.
* ``beside``: gaps between tokens of four streams while turns come back one after the other, over those without reuse.
* ``beside-fetches``: the same on two mixed instances, while two prompts at once go on where one that an instance keeps
  ends, so that the other copies it.
* ``beside-loads``: the same on a mixed instance, while turns come back from a tier on a disk, as in ``offloaded``.
* ``strangers``: whether TTFT tells a tenant of another's prompt: one that was asked for under another key, and one that
  nobody asked for, in 200 pairs; the probability of such ranks (Mann-Whitney) if they are alike.
* ``killed``: a decode instance is killed at that context: tokens of its request that are computed again.

Prints what is aimed at beside each figure, and exits 1 if one is missed.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import statistics
import tempfile
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import anyio
import httpx

from benchmarks.harness.report import Limits, heading, quantile
from pdmesh.core.sessions.session_state import NUM_PAUSES
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh_testing.checkpoints import LLAMA_82M, write_checkpoint
from pdmesh_testing.conversations import turns_after_tools
from pdmesh_testing.mesh import RunningMesh, running_mesh
from pdmesh_testing.streaming import Answer, ask

ANSWER_TOKENS = 64
NEW_TOKENS = 36

#: Of the next turn's time to first token over the first one's: at most, and aimed at.
MOST_TTFT, AIM_TTFT = 0.15, 0.05
LEAST_CACHED = 0.95
TOOL_S, MOST_AFTER_TOOL = 30.0, 1.2
NOISE = 0.01
MOST_ITL = 1.1

#: Below, a stranger's prompts are told apart.
LEAST_P = 0.01
NUM_PAIRS, PAIR_TOKENS = 200, 512

#: Of a full cache, in prompts and their answers.
NUM_KEPT = 4

#: Users of the part ``offloaded``, and the conversations of theirs that the cache holds.
NUM_USERS, NUM_CACHED = 8, 2

#: Beside which turns come: streams, and tokens of each. Tokens of a turn's answer, and of what twins do not share.
NUM_STREAMS, STREAM_PROMPT_TOKENS, STREAM_TOKENS = 4, 100, 400
TURN_TOKENS = 16
TWIN_TOKENS = 200

TOKEN_BYTES = 4 * LLAMA_82M.num_layers * LLAMA_82M.num_kv_heads * LLAMA_82M.head_dim

SETTINGS = {"WORKER_DTYPE": "bfloat16", "SCHEDULER_MAX_QUEUE_S": "600"}
REUSE = {"with": "tenant", "without": "off"}
POOLS: Mapping[str, tuple[int, int, int]] = {"1P+1D": (1, 1, 0), "mixed": (0, 0, 1)}


class Bench:
    """Meshes with and without reuse, and the figures that they give."""

    def __init__(self, model: Path, folder: Path, num_tokens: int, rounds: int, limits: Limits) -> None:
        self._model = model
        self._folder = folder
        self._num_tokens = num_tokens
        self._rounds = rounds
        self._limits = limits
        self._rng = random.Random(0)
        self._num_meshes = 0

    def prompt(self, num_tokens: int | None = None) -> list[int]:
        return [self._rng.randrange(LLAMA_82M.vocab_size) for _ in range(num_tokens or self._num_tokens)]

    def mesh(
        self, stack: ExitStack, pools: tuple[int, int, int], reuse: str, settings: Mapping[str, str] | None = None
    ) -> RunningMesh:
        self._num_meshes += 1
        prefill, decode, mixed = pools
        return stack.enter_context(
            running_mesh(
                self._folder / f"mesh{self._num_meshes}",
                model=self._model,
                prefill=prefill,
                decode=decode,
                mixed=mixed,
                settings=SETTINGS | {"GATEWAY_PREFIX_REUSE": REUSE[reuse], **(settings or {})},
            )
        )

    def _settings_of_tier(self, num_others: int = 0) -> dict[str, str]:
        """Of an instance that holds two users' conversations and so many tokens of others, with a tier for all."""
        num_tokens = NUM_CACHED * (self._num_tokens + 3 * ANSWER_TOKENS) + num_others
        return {
            "WORKER_KV_CACHE_BYTES": str(num_tokens * TOKEN_BYTES),
            "WORKER_KV_OFFLOAD_DISK_BYTES": str(NUM_USERS * num_tokens * TOKEN_BYTES),
            "WORKER_KV_OFFLOAD_DIR": str(self._folder / "offloaded"),
        }

    async def offloaded(self) -> None:
        """Measure turns that come back from the offload tier."""
        with ExitStack() as stack:
            mesh = self.mesh(stack, POOLS["mixed"], "with", self._settings_of_tier())
            await self._conversations("offloaded", mesh, NUM_USERS)

    async def turns(self) -> None:
        for name, pools in POOLS.items():
            with ExitStack() as stack:
                await self._conversations(f"turns {name}", self.mesh(stack, pools, "with"), 1)

    async def _conversations(self, name: str, mesh: RunningMesh, num_users: int) -> None:
        """Measure the second turns of so many users, after the first ones of all."""
        first_s, next_s, cached = list[float](), list[float](), list[float]()
        async with mesh.client() as client:
            await ask(client, self.prompt(), ANSWER_TOKENS)  # everything was used once
            for _ in range(self._rounds):
                turns: list[list[int]] = []
                for _ in range(num_users):
                    prompt = self.prompt()
                    first = await ask(client, prompt, ANSWER_TOKENS)
                    first_s.append(first.ttft_s)
                    turns.append([*prompt, *first.token_ids, *self.prompt(NEW_TOKENS)])
                await anyio.sleep(0.3)  # for what it held to be given back
                for turn in turns:
                    second = await ask(client, turn, ANSWER_TOKENS)
                    next_s.append(second.ttft_s)
                    cached.append(second.num_cached_tokens / len(turn))
        first_ms, next_ms, share = (
            *(1e3 * statistics.median(each) for each in (first_s, next_s)),
            statistics.mean(cached),
        )
        of_ttft = self._limits.at_most(f"{name}: TTFT", next_ms / first_ms, MOST_TTFT)
        of_cached = self._limits.at_least(f"{name}: cached", share, LEAST_CACHED)
        print(
            f"{name}: first {first_ms:.0f} ms, next {next_ms:.0f} ms: {next_ms / first_ms:.3f} (<= {MOST_TTFT}, aim "
            f"{AIM_TTFT}; {of_ttft}); cached {share:.3f} (>= {LEAST_CACHED}; {of_cached})",
            flush=True,
        )

    async def tool_call(self) -> None:
        """Measure turns after tool calls during which others fill the cache."""
        with ExitStack() as stack:
            num_more = NUM_CACHED * (NUM_PAUSES + 1 + 2 * self._rounds) * GRANULE_TOKENS
            mesh = self.mesh(stack, POOLS["mixed"], "with", self._settings_of_tier(self._num_tokens // 2 + num_more))
            ttft_s = await turns_after_tools(mesh, LLAMA_82M.vocab_size, self._num_tokens, TOOL_S, self._rounds)
        for kind, most in (("unnamed", math.inf), ("named", MOST_AFTER_TOOL)):
            after, stayed = (statistics.median(ttft_s[kind, is_full]) for is_full in (True, False))
            words = f"<= {most}; {self._limits.at_most(f'tool-call, {kind}: TTFT', after / stayed, most)}"
            print(f"tool-call, {kind}: {after:.3f} s, stayed {stayed:.3f}: {after / stayed:.2f} ({words})", flush=True)

    async def cold(self) -> None:
        with ExitStack() as stack:
            num_bytes = NUM_KEPT * (self._num_tokens + ANSWER_TOKENS) * TOKEN_BYTES
            settings = {"WORKER_KV_CACHE_BYTES": str(num_bytes)}
            meshes = {reuse: self.mesh(stack, POOLS["1P+1D"], reuse, settings) for reuse in REUSE}
            ttft_s: dict[str, list[float]] = {reuse: [] for reuse in REUSE}
            rate: dict[str, list[float]] = {reuse: [] for reuse in REUSE}
            for number in range(-NUM_KEPT - 1, 4 * self._rounds):
                for reuse in REUSE if number % 2 else reversed(REUSE):
                    async with meshes[reuse].client() as client:
                        answer = await ask(client, self.prompt(), ANSWER_TOKENS)
                    if number >= 0:  # those before fill the caches
                        ttft_s[reuse].append(answer.ttft_s)
                        took_s = answer.times_s[-1] - answer.began_s
                        rate[reuse].append((self._num_tokens + ANSWER_TOKENS) / took_s)
        ttft = {reuse: statistics.median(values) for reuse, values in ttft_s.items()}
        tokens = {reuse: statistics.median(values) for reuse, values in rate.items()}
        slower = self._limits.at_most("cold: TTFT", ttft["with"] / ttft["without"], 1 + NOISE)
        fewer = self._limits.at_least("cold: tokens/s", tokens["with"] / tokens["without"], 1 - NOISE)
        print(
            f"cold: TTFT {1e3 * ttft['with']:.0f} ms, without reuse {1e3 * ttft['without']:.0f}: "
            f"{ttft['with'] / ttft['without']:.3f} (<= {1 + NOISE}; {slower}); tokens/s {tokens['with']:.0f}, without "
            f"{tokens['without']:.0f}: {tokens['with'] / tokens['without']:.3f} (>= {1 - NOISE}; {fewer}); medians of "
            f"{4 * self._rounds}",
            flush=True,
        )

    async def beside(self) -> None:
        for name, pools in POOLS.items():
            await self._beside(f"beside {name}", pools, {}, Conversations)

    async def beside_fetches(self) -> None:
        """Measure what streams notice of prefixes that are copied between the instances that they decode on."""
        await self._beside("beside fetches", (0, 0, 2), {}, Twins, "prefix_cache_fetched_tokens")

    async def beside_loads(self) -> None:
        """Measure what streams notice of turns that come from the offload tier."""
        settings = self._settings_of_tier(NUM_STREAMS * (STREAM_PROMPT_TOKENS + STREAM_TOKENS))
        await self._beside("beside loads", POOLS["mixed"], settings, ManyConversations, "kv_offload_loaded_tokens")

    async def _beside(
        self,
        name: str,
        pools: tuple[int, int, int],
        settings: Mapping[str, str],
        kind: type[Turns],
        counter: str | None = None,
    ) -> None:
        """Measure gaps of streams beside turns of a ``kind``, with and without reuse, which the ``counter`` counts."""
        gaps_s: dict[str, list[float]] = {reuse: [] for reuse in REUSE}
        num_turns = dict.fromkeys(REUSE, 0)
        with ExitStack() as stack:
            meshes = {reuse: self.mesh(stack, pools, reuse, settings) for reuse in REUSE}
            for number in range(self._rounds):
                for reuse in REUSE if number % 2 else reversed(REUSE):
                    async with meshes[reuse].client() as client:
                        gaps, turns = await self._gaps_beside(client, kind(self, self._num_tokens // 2))
                    gaps_s[reuse] += gaps
                    num_turns[reuse] += turns
            num_tokens = 0.0 if counter is None else meshes["with"].total(counter)
        p99 = {reuse: quantile(gaps, 0.99) for reuse, gaps in gaps_s.items()}
        words = self._limits.at_most(f"{name}: ITL", p99["with"] / p99["without"], MOST_ITL)
        print(
            f"{name}: ITL p99 {1e3 * p99['with']:.1f} ms beside {num_turns['with']} turns, without reuse "
            f"{1e3 * p99['without']:.1f} beside {num_turns['without']}: {p99['with'] / p99['without']:.3f} "
            f"(<= {MOST_ITL}; {words})",
            flush=True,
        )
        if counter is not None:
            print(f"{name}: {num_tokens:,.0f} ({counter}; {self._limits.at_least(counter, num_tokens, 1)})", flush=True)

    async def _gaps_beside(self, client: httpx.AsyncClient, turns: Turns) -> tuple[list[float], int]:
        """Gaps of streams while turns are asked for, and how many of those were answered."""
        gaps_s: list[float] = []
        num_turns = 0
        async with anyio.create_task_group() as tasks:
            num_left = NUM_STREAMS

            async def stream() -> None:
                nonlocal num_left
                gaps_s.extend((await ask(client, self.prompt(STREAM_PROMPT_TOKENS), STREAM_TOKENS)).gaps_s)
                num_left -= 1

            for _ in range(turns.num_before):
                await turns.go_on(client)
            for _ in range(num_left):
                tasks.start_soon(stream)
            while num_left:
                num_turns += await turns.go_on(client)
        return gaps_s, num_turns

    async def strangers(self) -> None:
        keys = self._folder / "keys"
        keys.write_text("key-of-a\nkey-of-b\n")
        with ExitStack() as stack:
            mesh = self.mesh(stack, POOLS["1P+1D"], "with", {"SECURITY_API_KEYS_FILE": str(keys)})
            ttft_s: dict[str, list[float]] = {"theirs": [], "nobody's": []}
            num_cached = 0
            async with mesh.client() as a, mesh.client() as b:
                a.headers["Authorization"], b.headers["Authorization"] = "Bearer key-of-a", "Bearer key-of-b"
                for number in range(NUM_PAIRS + 1):
                    prompts = {"theirs": self.prompt(PAIR_TOKENS), "nobody's": self.prompt(PAIR_TOKENS)}
                    await ask(a, prompts["theirs"], 2)
                    for whose in prompts if number % 2 else reversed(prompts):
                        answer = await ask(b, prompts[whose], 2)
                        num_cached += answer.num_cached_tokens
                        if number:  # the first is to use everything once
                            ttft_s[whose].append(answer.ttft_s)
        p = probability_alike(*ttft_s.values())
        medians = ", ".join(f"{whose} {1e3 * statistics.median(values):.1f} ms" for whose, values in ttft_s.items())
        words = self._limits.at_least("strangers: p", p, LEAST_P)
        shared = self._limits.at_most("strangers: tokens shared", num_cached, 0.5)
        print(
            f"strangers: TTFT {medians}; p {p:.2f} (>= {LEAST_P}; {words}); {num_cached} tokens shared (0; {shared})",
            flush=True,
        )

    async def killed(self) -> None:
        with ExitStack() as stack:
            mesh = self.mesh(stack, (1, 2, 0), "with")
            prompt, answers = self.prompt(), list[Answer]()
            async with mesh.client() as client:

                async def stream() -> None:
                    answers.append(await ask(client, prompt, 300))

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(stream)
                    while True:
                        await anyio.sleep(0.05)
                        if decoding := [i for i in (await mesh.state()).instances if i.num_decoding]:
                            break
                    await anyio.sleep(0.5)
                    os.kill(decoding[0].pid, signal.SIGKILL)
            record = mesh.request_record(answers[0].response_id)
            chunks = [entry.figures for entry in record.entries if entry.what == "chunk"]
            num_computed = sum(figures["num_tokens"] for figures in chunks)
            num_delivered = max(figures["start"] + figures["num_tokens"] for figures in chunks) - len(prompt)
            again = num_computed - len(prompt) - num_delivered
            words = self._limits.at_most("killed: prompt tokens computed again", again, GRANULE_TOKENS)
            print(
                f"killed at {len(prompt) + num_delivered:.0f} tokens, {num_delivered:.0f} of them drawn: "
                f"{again:.0f} tokens of the prompt computed again (<= {GRANULE_TOKENS}; {words})",
                flush=True,
            )


class Turns(ABC):
    """What is asked for beside streams."""

    num_before = 0

    def __init__(self, bench: Bench, num_tokens: int) -> None:
        self._bench = bench
        self._num_tokens = num_tokens

    @abstractmethod
    async def go_on(self, client: httpx.AsyncClient) -> int:
        """Ask for some turns; how many were answered."""

    async def next_turn(self, client: httpx.AsyncClient, turn: list[int]) -> list[int]:
        """The turn behind one and its answer."""
        answer = await ask(client, turn, TURN_TOKENS)
        return [*turn, *answer.token_ids, *self._bench.prompt(NEW_TOKENS)]


class Conversations(Turns):
    """A turn of each of some users, one after the other, and again."""

    num_users = 1

    def __init__(self, bench: Bench, num_tokens: int) -> None:
        super().__init__(bench, num_tokens)
        self._turns = deque(bench.prompt(num_tokens) for _ in range(self.num_users))

    async def go_on(self, client: httpx.AsyncClient) -> int:
        self._turns.append(await self.next_turn(client, self._turns.popleft()))
        return 1


class ManyConversations(Conversations):
    """So many that a turn's place in the cache has been taken by others' when it comes."""

    num_users = num_before = 2 * NUM_USERS


class Twins(Turns):
    """A prompt, and then two at once that go on where it ends; and another one."""

    async def go_on(self, client: httpx.AsyncClient) -> int:
        stem = self._bench.prompt(self._num_tokens)
        await ask(client, stem, 1)
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(ask, client, [*stem, *self._bench.prompt(TWIN_TOKENS)], TURN_TOKENS)
        return 3


def probability_alike(one: Sequence[float], other: Sequence[float]) -> float:
    """Two-sided p of the Mann-Whitney test, by its normal approximation."""
    ranked = sorted([(value, 0) for value in one] + [(value, 1) for value in other])
    rank_sum = sum(rank for rank, (_, which) in enumerate(ranked, start=1) if which == 0)
    u = rank_sum - len(one) * (len(one) + 1) / 2
    deviation = math.sqrt(len(one) * len(other) * (len(one) + len(other) + 1) / 12)
    return math.erfc(abs(u - len(one) * len(other) / 2) / deviation / math.sqrt(2))


PARTS = {
    "turns": Bench.turns,
    "cold": Bench.cold,
    "beside": Bench.beside,
    "beside-fetches": Bench.beside_fetches,
    "beside-loads": Bench.beside_loads,
    "strangers": Bench.strangers,
    "killed": Bench.killed,
    "offloaded": Bench.offloaded,
    "tool-call": Bench.tool_call,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--part", action="append", choices=PARTS)
    arguments = parser.parse_args()
    print(heading(f"Turns of a conversation of {arguments.tokens} tokens"))
    limits = Limits()
    with tempfile.TemporaryDirectory() as name:
        model = write_checkpoint(Path(name) / "model", shape=LLAMA_82M, dtype="bfloat16")
        bench = Bench(model, Path(name), arguments.tokens, arguments.rounds, limits)
        for part in arguments.part or PARTS:
            anyio.run(PARTS[part], bench)
    limits.end()


if __name__ == "__main__":
    main()
