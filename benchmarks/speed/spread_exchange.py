"""A context decoded over two instances of one host: a layer's exchange, and a token's time over one instance's.

An exchange is a question and its answer about a range of one block, so that attention takes next to nothing. A token's
*quiet* time is the sum of each layer's least time over all rounds, so that other processes delay it less.

    python -m benchmarks.speed.spread_exchange [--contexts 8192 32768] [--rounds 24] [--format int8]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio
import structlog

from benchmarks.harness.qwen_shape import BLOCK, SHAPE
from benchmarks.harness.report import Limits, heading, quantile
from benchmarks.speed.formats import FORMATS, quantization_config
from pdmesh.kv.remote_kv import RangeQuestion
from pdmesh.kv.spread import SpreadKv
from pdmesh.kv_layout import KvLayout
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import LinearLatencyModel
from pdmesh_lab.sim.mesh import MeshShape, study_core
from pdmesh_lab.sim.simulator import SimConfig, Simulator
from pdmesh_lab.sim.workload import Arrival
from pdmesh_testing.checkpoints import write_config
from pdmesh_testing.range_holder import data_plane, decode, random_engine, range_holder

LONGEST = replace(SHAPE, max_position_embeddings=1 << 17)
ATTENDS = replace(LONGEST, vocab_size=1024, intermediate_size=64)  # for engines that compute attention alone
NUM_EXCHANGES, EXCHANGE_LIMIT_S, TOKEN_LIMIT, SIMULATED_LIMIT = 2000, 0.3e-3, 0.85, 0.15


async def exchanges(model: Path, limits: Limits) -> float:
    """Print how long questions and their answers take, and return the median for one context."""
    medians_s: list[float] = []
    with range_holder(model, BLOCK) as holder:
        async with data_plane(random_engine(model, 4 * BLOCK, BLOCK)) as owner:
            kvs = [await holder.hold(f"exchange-{number}", owner) for number in range(8)]
            for num_contexts in (1, 2, 8):
                before_s = await holder.cpu_s()
                times_s, cpu_s = await owner.thread.run(partial(exchange, kvs[:num_contexts]))
                cpus_us = [each / NUM_EXCHANGES * 1e6 for each in (cpu_s, await holder.cpu_s() - before_s)]
                medians_s.append(statistics.median(times_s))
                what = f"a layer's exchange, contexts: {num_contexts}"
                verdict = "" if num_contexts > 1 else ", " + limits.at_most(what, medians_s[0], EXCHANGE_LIMIT_S)
                cpu = f"CPU {cpus_us[0]:.0f} us of the owner, {cpus_us[1]:.0f} us of the holder"
                print(f"{what}: {quantiles(times_s, 1e6, 'us')}; {cpu}{verdict}", flush=True)
    return medians_s[0]


def exchange(kvs: Sequence[SpreadKv]) -> tuple[list[float], float]:
    """Ask about all contexts and wait for all answers, many times. Return each time, and this thread's CPU time."""
    times_s, cpu_s, row = list[float](), time.thread_time(), bytes(2 * SHAPE.num_heads * SHAPE.head_dim)
    for number in range(NUM_EXCHANGES):
        began_s = time.perf_counter()
        for kv in kvs:
            kv.ask(RangeQuestion(number % SHAPE.num_layers, 2 * BLOCK, row), more=kv is not kvs[-1])
        for kv in kvs:
            kv.answers()
        times_s.append(time.perf_counter() - began_s)
    return times_s[NUM_EXCHANGES // 10 :], time.thread_time() - cpu_s


async def tokens(models: Sequence[Path], length: int, num_rounds: int, exchange_s: float, limits: Limits) -> None:
    """Print a token's time at a context's length on one instance, over two, and simulated over two."""
    alone, engine = random_engine(models[1], length, 0), random_engine(models[1], length // 2, length // 2)
    with range_holder(models[0], length // 2) as holder:
        async with data_plane(engine) as owner:
            over_two = partial(decode, engine, length, await holder.hold("token", owner))
            runs = [partial(decode, alone, length // 8), partial(decode, alone, length), over_two]
            rounds_s = [[await owner.thread.run(run) for run in runs] for _ in range(num_rounds + 1)][1:]
    quiet_s: list[float] = []
    print(f"{length} tokens, {engine.arithmetic}; load {os.getloadavg()[0]:.1f}")
    for name, times_s in zip(("one, an eighth", "one", "two"), zip(*rounds_s, strict=True), strict=True):
        quiet_s.append(sum(map(min, zip(*times_s, strict=True))))
        print(f"  {name:15} {quantiles([*map(sum, times_s)], 1e3, 'ms')}; quiet {quiet_s[-1] * 1e3:.1f} ms")
    simulated_s = simulated_token_s(length, quiet_s[0], quiet_s[1], engine.kv.layout, exchange_s)
    what, ratio = f"a token at {length} tokens, two instances over one", quiet_s[2] / quiet_s[1]
    print(f"  {what}: {ratio:.3f}", "" if length < 32768 else limits.at_most(what, ratio, TOKEN_LIMIT))
    far = limits.at_most(f"{what}, from simulated", abs(quiet_s[2] / simulated_s - 1), SIMULATED_LIMIT)
    print(f"  simulated {simulated_s * 1e3:.1f} ms; measured over it {quiet_s[2] / simulated_s:.3f}, {far}", flush=True)


def simulated_token_s(length: int, short_s: float, long_s: float, layout: KvLayout, exchange_s: float) -> float:
    """Return a token's time over two instances that take ``long_s`` alone, and ``short_s`` with an eighth of it."""
    context_s = (long_s - short_s) / (length - length // 8)
    prefill = {"a_s": 1e-3, "b_s": 1e-5, "c_s": 0.0, "d_s": 0.0}
    costs = LinearLatencyModel(**prefill, decode_a_s=long_s - length * context_s, decode_context_s=context_s)
    mesh = MeshShape(num_prefill=1, num_decode=2, num_mixed=0, kv_layout=layout, num_kv_tokens=2 * length)
    instances = [(replace(profile, max_kv_tokens=length // 2), each) for profile, each in mesh.instances(costs)]
    core, config = study_core("pdmesh", PolicyConfig(latency=costs), 0), SimConfig(part_exchange_s=exchange_s)
    arrival = Arrival(arrival_s=0.0, num_prompt_tokens=length - 64, num_output_tokens=40)
    times_s = Simulator(core, instances, [arrival], config).run().requests[0].token_times_s
    return (times_s[-1] - times_s[1]) / (len(times_s) - 2)


def quantiles(times_s: Sequence[float], scale: float, unit: str) -> str:
    p50, p90, p99 = (quantile(times_s, share) * scale for share in (0.5, 0.9, 0.99))
    return f"p50 {p50:.1f}, p90 {p90:.1f}, p99 {p99:.1f}, least {min(times_s) * scale:.1f} {unit}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--rounds", type=int, default=24, help="decodes on one instance, and as many over two")
    parser.add_argument("--format", choices=[name for name in FORMATS if name != "NF4"], default="bf16")
    arguments, limits = parser.parse_args(), Limits()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    print(heading(f"A context over two instances of one host, one thread each, {arguments.format}"), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        shapes = {"attends": ATTENDS, "model": LONGEST}
        models = [write_config(Path(folder) / name, shape=shapes[name], dtype="bfloat16") for name in shapes]
        if (quantization := quantization_config(arguments.format)) is not None:
            config = json.loads((models[1] / "config.json").read_text())
            (models[1] / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
        exchange_s = anyio.run(exchanges, models[0], limits)
        for length in arguments.contexts:
            anyio.run(tokens, models, length, arguments.rounds, exchange_s, limits)
    limits.end()


if __name__ == "__main__":
    main()
