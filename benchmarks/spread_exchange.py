"""Decodes of a context over two instances of one host, on the clock: a layer's exchange, and a token over one's.

Two processes, each with an engine of one thread, a data plane and nothing else: a home, which decodes, and a member,
which holds the first half of the context. Weights and KV are random; no prompt is computed.

With ``--live``, a mesh of one prefill and two decode instances serves a random model of that shape instead. A client
measures tokens of contexts within one range, and of those spread over both decode instances.

*Exchange*: from the question to its answer, about a range of one block, so that attention takes next to nothing.
*Token*: a decode step at a context's length, on one instance, and over two that hold half of the context each.

    python benchmarks/spread_exchange.py [--shape demo|0.5b] [--contexts 2048 8192 32768]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import anyio
import anyio.to_thread
import openai
import torch
from report import Limits, heading

from pdmesh.config import TransferConfig
from pdmesh.engine.base import SequenceSlice
from pdmesh.engine.runner import TorchEngine
from pdmesh.kv.blocks import BlockPool
from pdmesh.kv.elsewhere import KvElsewhere, PartQuestion
from pdmesh.kv.mover import KvMover
from pdmesh.kv.spread import PartHolder
from pdmesh.model import Epoch, KvLayout, RequestId
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import LinearLatencyModel
from pdmesh.transport.ucx import UcxTransport
from pdmesh.worker.threads import EngineThread
from pdmesh_lab.sim.mesh import MeshShape, study_core
from pdmesh_lab.sim.simulator import SimConfig, Simulator
from pdmesh_lab.sim.workload import Arrival
from pdmesh_testing.checkpoints import CheckpointShape, write_checkpoint, write_config
from pdmesh_testing.exactness import random_prompts
from pdmesh_testing.load import LoadRequest, Stream, follow
from pdmesh_testing.mesh import RunningMesh, running_mesh
from pdmesh_testing.stepping import new_sequence

#: The shape of Qwen2.5 0.5B, and of the model of `pdmesh up --demo`.
SHAPES = {
    "0.5b": CheckpointShape(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        max_position_embeddings=1 << 17,
        tie_word_embeddings=True,
    ),
    "demo": CheckpointShape(
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=512,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        max_position_embeddings=1 << 17,
        tie_word_embeddings=True,
    ),
}
BLOCK_SIZE = 16
EPOCH, CAPABILITY = Epoch(1), 0x5EED
NUM_EXCHANGES = 2000
EXCHANGE_LIMIT_S, TOKEN_LIMIT = 0.3e-3, 0.85


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--tokens", type=int, default=48, help="decode steps for each context")
    parser.add_argument("--live", action="store_true", help="measure a mesh, with contexts of --contexts tokens")
    parser.add_argument("--member", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--range", type=int, default=BLOCK_SIZE, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.member is not None:
        anyio.run(be_member, arguments.member, arguments.range)
        return
    limits = Limits()
    print(heading(f"A context over two instances of one host, shape {arguments.shape}, one thread each"), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.live:
            live(Path(folder), SHAPES[arguments.shape], arguments.contexts)
            limits.end()
        shape = SHAPES[arguments.shape]
        few_weights = replace(shape, num_layers=2, vocab_size=8192)
        small = write_config(Path(folder) / "small", shape=few_weights, dtype="bfloat16")
        exchange_s = anyio.run(exchanges, small, limits)
        model = write_config(Path(folder) / "model", shape=shape, dtype="bfloat16")
        for num_tokens in arguments.contexts:
            anyio.run(tokens, model, num_tokens, arguments.tokens, exchange_s, limits)
    limits.end()


def live(folder: Path, shape: CheckpointShape, lengths: Sequence[int]) -> None:
    """Print a token's time at a client: without a limit, and with one that spreads the longest context over both."""
    model = write_checkpoint(folder / "model", shape=shape, dtype="bfloat16")
    for limit in (0, max(lengths) * 3 // 4 // BLOCK_SIZE * BLOCK_SIZE):
        settings = {"WORKER_NUM_THREADS": "1", "WORKER_MAX_KV_TOKENS_PER_INSTANCE": str(limit)}
        with running_mesh(folder / str(limit), model=model, decode=2, settings=settings) as mesh:
            for length in lengths:
                gaps_s = anyio.run(live_gaps_s, mesh, shape, length)
                parts = 1 if limit == 0 else -(-length // limit)
                print(f"live, {length} tokens in {parts} ranges: a token {percentiles(gaps_s, 1e3, 'ms')}", flush=True)


async def live_gaps_s(mesh: RunningMesh, shape: CheckpointShape, length: int) -> list[float]:
    """Return the times between the tokens of three answers, one after the other."""
    gaps_s: list[float] = []
    for seed in range(3):
        (prompt,) = random_prompts([length], shape.vocab_size, seed=seed)
        stream = Stream(LoadRequest(tuple(prompt), max_tokens=100, temperature=0.0, seed=seed), time.monotonic())
        async with openai.AsyncOpenAI(base_url=f"{mesh.base_url}/v1", api_key="none") as client:
            await follow(client, mesh.model, stream)
        if stream.error is not None:
            raise RuntimeError(stream.error)
        gaps_s += [after - before for before, after in pairwise(stream.token_times_s[10:])]
    return gaps_s


@asynccontextmanager
async def instance(engine: TorchEngine) -> AsyncIterator[tuple[UcxTransport, KvMover, EngineThread]]:
    """Open an instance's data plane over an engine whose cache is full of random numbers."""
    for cache in engine.kv.layers:
        cache.normal_(std=0.5)
    config, pool = TransferConfig(transport="ucx"), BlockPool(engine.kv.num_blocks)
    async with EngineThread() as thread, UcxTransport(config) as transport:
        mover = KvMover(
            transport=transport,
            store=engine.kv,
            pool=pool,
            config=config,
            on_outcome=print,
            attend_part=engine.attend_part,
            wakeup=thread.wakeup,
        )
        async with mover:
            yield transport, mover, thread


def load(model: Path, num_tokens: int, range_tokens: int) -> TorchEngine:
    return TorchEngine(
        model,
        num_blocks=num_tokens // BLOCK_SIZE + 8,
        block_size=BLOCK_SIZE,
        num_threads=1,
        has_random_weights=True,
        range_tokens=range_tokens,
    )


# --- the member's process ---------------------------------------------------------------------------------------------


async def be_member(model: Path, range_tokens: int) -> None:
    """Hold a range for each line of standard input, ``{"request": …, "home": …}``, until it ends."""
    engine = load(model, range_tokens, range_tokens)
    async with instance(engine) as (transport, mover, _):
        print(json.dumps({"address": transport.address.hex()}), flush=True)
        while line := await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
            said = json.loads(line)
            request_id = RequestId(said["request"])
            mover.parts.hold(
                request_id,
                EPOCH,
                capability=CAPABILITY,
                block_ids=range(range_tokens // BLOCK_SIZE),
                home_address=bytes.fromhex(said["home"]),
                member=0,
            )
            mover.parts.landed(request_id, EPOCH)
            print(json.dumps({}), flush=True)


@dataclass(slots=True)
class Member:
    """The other process."""

    process: subprocess.Popen[str]
    address: bytes = b""

    def hold(self, request: str, home: bytes) -> None:
        self.say({"request": request, "home": home.hex()})

    def say(self, said: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(said) + "\n")
        self.process.stdin.flush()
        self.hear()

    def hear(self) -> dict[str, Any]:
        stdout: IO[str] | None = self.process.stdout
        assert stdout is not None
        for line in stdout:
            if line.startswith("{"):
                return json.loads(line)  # type: ignore[no-any-return]
        raise RuntimeError("the member has ended")


@contextmanager
def started_member(model: Path, range_tokens: int) -> Iterator[Member]:
    command = [sys.executable, __file__, "--member", str(model), "--range", str(range_tokens)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        member = Member(process)
        try:
            member.address = bytes.fromhex(member.hear()["address"])
            yield member
        finally:
            process.stdin.close()  # type: ignore[union-attr]  # it is a pipe
            process.wait(30)


# --- the home ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Timed:
    """`KvElsewhere` that notes when a layer's question was asked, when answers were waited for, and when all came."""

    asked: KvElsewhere
    asks_s: list[float] = field(default_factory=list[float])
    waits_s: list[float] = field(default_factory=list[float])
    layers_s: list[float] = field(default_factory=list[float])
    began_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return self.asked.num_tokens

    def ask(self, question: PartQuestion, *, more: bool = False) -> None:
        self.began_s = time.perf_counter()
        self.asked.ask(question, more=more)
        self.asks_s.append(time.perf_counter() - self.began_s)

    def answers(self) -> Sequence[bytes]:
        before_s = time.perf_counter()
        answers = self.asked.answers()
        now_s = time.perf_counter()
        self.waits_s.append(now_s - before_s)
        self.layers_s.append(now_s - self.began_s)
        return answers


async def exchanges(model: Path, limits: Limits) -> float:
    """Print how long questions and their answers take, and return the median for one context."""
    engine = load(model, 4 * BLOCK_SIZE, BLOCK_SIZE)
    layout = engine.kv.layout
    shape = json.loads((model / "config.json").read_text())
    row = torch.randn(shape["num_attention_heads"] * layout.head_dim).bfloat16().view(torch.uint8).numpy().tobytes()
    with started_member(model, BLOCK_SIZE) as member:
        async with instance(engine) as (transport, mover, thread):
            timed: list[Timed] = []
            for number in range(8):
                await anyio.to_thread.run_sync(member.hold, f"exchange-{number}", transport.address)
                kv = mover.parts.open(
                    RequestId(f"exchange-{number}"),
                    EPOCH,
                    members=[PartHolder(member.address, CAPABILITY)],
                    num_tokens=BLOCK_SIZE,
                )
                timed.append(Timed(kv))
            medians_s: list[float] = []
            for num_contexts in (1, 2, 8):
                taken_s = await thread.run(partial(exchange, timed[:num_contexts], row, layout.num_layers))
                what, verdict = f"a layer's exchange, contexts: {num_contexts}", ""
                medians_s.append(statistics.median(taken_s))
                if num_contexts == 1:
                    verdict = ", " + limits.at_most(what, medians_s[0], EXCHANGE_LIMIT_S)
                print(f"{what}, {len(row)} bytes each: {percentiles(taken_s, 1e6, 'us')}{verdict}", flush=True)
            return medians_s[0]


def exchange(timed: Sequence[Timed], row: bytes, num_layers: int) -> list[float]:
    """Ask about all contexts and wait for all answers, many times."""
    taken_s: list[float] = []
    for number in range(NUM_EXCHANGES):
        began_s = time.perf_counter()
        question = PartQuestion(number % num_layers, 2 * BLOCK_SIZE, row)
        for each in timed:
            each.ask(question, more=each is not timed[-1])
        for each in timed:
            each.answers()
        taken_s.append(time.perf_counter() - began_s)
    return taken_s[NUM_EXCHANGES // 10 :]


async def tokens(model: Path, num_tokens: int, num_steps: int, exchange_s: float, limits: Limits) -> None:
    """Print a token's time at a context's length on one instance, over two, and simulated over two."""
    half, fastest_s, alone_s = num_tokens // 2, 0.0, dict[int, float]()
    for range_tokens in (0, 2 * num_tokens):  # the second: the kernels of spread contexts, over one range
        alone = load(model, num_tokens + num_steps + BLOCK_SIZE, range_tokens)
        arithmetic = alone.arithmetic
        async with EngineThread() as thread:
            for cache in alone.kv.layers:
                cache.normal_(std=0.5)
            for length in (num_tokens // 8, num_tokens):
                taken_s = await thread.run(partial(decode, alone, length, num_steps, 0, None))
                alone_s[length] = statistics.median(taken_s)
                print(
                    f"{length} tokens, one instance, {arithmetic}: a token {percentiles(taken_s, 1e3, 'ms')}",
                    flush=True,
                )
        if not range_tokens:
            fastest_s = alone_s[num_tokens]
        del alone
    engine = load(model, half + num_steps + BLOCK_SIZE, half)
    with started_member(model, half) as member:
        async with instance(engine) as (transport, mover, thread):
            await anyio.to_thread.run_sync(member.hold, "token", transport.address)
            members = [PartHolder(member.address, CAPABILITY)]
            timed = Timed(mover.parts.open(RequestId("token"), EPOCH, members=members, num_tokens=half))
            two_s = await thread.run(partial(decode, engine, num_tokens, num_steps, half, timed))
    token_s = statistics.median(two_s)
    simulated_s = simulated_token_s(num_tokens, alone_s, engine.kv.layout, exchange_s)
    what = f"{num_tokens} tokens, over two instances"
    print(f"{what}, {engine.arithmetic}: a token {percentiles(two_s, 1e3, 'ms')}")
    ratio = token_s / alone_s[num_tokens]
    verdict = f", {limits.at_most(what, ratio, TOKEN_LIMIT)}" if num_tokens >= 32768 else ""
    print(f"  {ratio:.3f} of one with the same kernels{verdict}; {token_s / fastest_s:.3f} of one with the fastest")
    print(f"  simulated {simulated_s * 1e3:.1f} ms; measured {token_s / simulated_s:.3f} of this")
    print(f"  a layer: from question to answers {percentiles(timed.layers_s, 1e6, 'us')}", end="")
    print(f", of this asking {percentiles(timed.asks_s, 1e6, 'us')}", end="")
    print(f", waiting {percentiles(timed.waits_s, 1e6, 'us')}", flush=True)


def simulated_token_s(num_tokens: int, alone_s: Mapping[int, float], layout: KvLayout, exchange_s: float) -> float:
    """Return a token's time over two instances that take ``alone_s`` for a decode alone, by the context's length."""
    (short, short_s), (length, length_s) = sorted(alone_s.items())
    context_s = (length_s - short_s) / (length - short)
    costs = LinearLatencyModel(
        a_s=1e-3, b_s=1e-5, c_s=0, d_s=0, decode_a_s=length_s - length * context_s, decode_context_s=context_s
    )
    mesh = MeshShape(num_prefill=1, num_decode=2, num_mixed=0, kv_layout=layout, num_kv_tokens=2 * num_tokens)
    instances = [(replace(profile, max_kv_tokens=num_tokens // 2), each) for profile, each in mesh.instances(costs)]
    arrival = Arrival(arrival_s=0.0, num_prompt_tokens=num_tokens - 64, num_output_tokens=40)
    config = SimConfig(part_exchange_s=exchange_s)
    core = study_core("pdmesh", PolicyConfig(latency=costs), 0)
    (run,) = Simulator(core, instances, [arrival], config).run().requests
    times_s = run.token_times_s
    return (times_s[-1] - times_s[1]) / (len(times_s) - 2)


def decode(
    engine: TorchEngine, num_tokens: int, num_steps: int, num_elsewhere: int, elsewhere: KvElsewhere | None
) -> list[float]:
    """Decode behind so many tokens, of which others hold the first; return what each step takes, but the first ones."""
    num_blocks = (num_tokens + num_steps - num_elsewhere) // BLOCK_SIZE + 1
    sequence = new_sequence([7] * num_tokens, range(num_blocks))
    sequence.elsewhere = elsewhere
    taken_s: list[float] = []
    for number in range(num_steps):
        part = SequenceSlice(sequence=sequence, start=num_tokens - 1 + number, num_tokens=1, sample=True)
        began_s = time.perf_counter()
        (result,) = engine.execute([part])
        taken_s.append(time.perf_counter() - began_s)
        sequence.token_ids.append(result.drawn[0].token_id)
    return taken_s[4:]


def percentiles(taken_s: Sequence[float], scale: float, unit: str) -> str:
    ordered = sorted(taken_s)
    at: Callable[[float], float] = lambda share: ordered[min(len(ordered) - 1, int(share * len(ordered)))] * scale  # noqa: E731
    return f"p50 {at(0.5):.1f}, p99 {at(0.99):.1f} {unit}"


if __name__ == "__main__":
    main()
