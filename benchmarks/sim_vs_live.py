"""How well the simulator foretells a live mesh: times to first token and to completion, p50 and p90.

A mesh with the 82M-parameter model of ``pdmesh_testing.checkpoints`` serves two runs of a mixed load, drawn from two
seeds: short prompts, Poisson, and a few long ones. A latency model is fitted to the event log of the first run, and
with it both runs are simulated, each with its own arrivals and its own outputs. The second run is the test: nothing was
fitted to it. Also fitted on the first run: what the way between client and scheduler adds to a request (one median).

    python benchmarks/sim_vs_live.py [--mesh 1P+1D|mixed] [--bundle fcfs] [--requests 60]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import anyio
import httpx
from report import Limits, heading

from pdmesh.decisions import Decision
from pdmesh.eventlog import EventLogReader, Header, core_of, replay
from pdmesh.metrics import percentile
from pdmesh.policy.latency import LinearLatencyModel
from pdmesh_lab.sim.recorded import RecordedRun, recorded_run
from pdmesh_lab.sim.result import RequestRun
from pdmesh_lab.sim.samples import fitted_model
from pdmesh_lab.sim.simulator import Simulator
from pdmesh_testing.checkpoints import LLAMA_82M, write_checkpoint
from pdmesh_testing.mesh import RunningMesh, running_mesh

LIMIT = 0.15
MESHES: Mapping[str, tuple[int, int, int]] = {"1P+1D": (1, 1, 0), "mixed": (0, 0, 1)}
FIT_SEED, TEST_SEED = 1, 2


@dataclass(frozen=True, slots=True)
class Load:
    """One request of a load."""

    at_s: float
    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Live:
    """A run as its clients and its log tell of it."""

    header: Header
    run: RecordedRun
    client_s: Mapping[str, tuple[float, float]]  # TTFT and JCT of each request
    foreign_cores: float  # that others kept busy meanwhile


def draw(seed: int, num_requests: int, rate: float, longs: Sequence[int]) -> list[Load]:
    rng = random.Random(seed)
    lengths = [rng.randint(32, 256) for _ in range(num_requests)]
    # The long ones come in the middle, far enough apart for each to end.
    for position, num_tokens in enumerate(longs, 1):
        lengths.insert(len(lengths) * position // (len(longs) + 1), num_tokens)
    loads: list[Load] = []
    at_s = 0.0
    for num_tokens in lengths:
        at_s += rng.expovariate(rate)
        prompt = [rng.randrange(LLAMA_82M.vocab_size) for _ in range(num_tokens)]
        loads.append(Load(at_s, prompt, rng.randint(8, 64)))
    return loads


async def ask(client: httpx.AsyncClient, mesh: RunningMesh, load: Load) -> tuple[str, tuple[float, float]]:
    """What the mesh calls the request; TTFT and JCT, as a streaming client sees them."""
    body = {
        "model": mesh.model,
        "prompt": load.prompt,
        "max_tokens": load.max_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    began_s = time.perf_counter()
    first_s = last_s = 0.0
    request_id = ""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {") and (chunk := json.loads(line[6:]))["choices"]:
                request_id = chunk["id"].removeprefix("cmpl-")
                last_s = time.perf_counter() - began_s
                first_s = first_s or last_s
    return request_id, (first_s, last_s)


async def play(mesh: RunningMesh, loads: Sequence[Load]) -> dict[str, tuple[float, float]]:
    """Each request at its time; TTFT and JCT by the request's id."""
    seen: dict[str, tuple[float, float]] = {}
    async with mesh.client() as client, anyio.create_task_group() as tasks:

        async def one(load: Load) -> None:
            request_id, times_s = await ask(client, mesh, load)
            seen[request_id] = times_s

        began_s = anyio.current_time()
        for load in loads:
            await anyio.sleep_until(began_s + load.at_s)
            tasks.start_soon(one, load)
    return seen


@dataclass(slots=True)
class Foreign:
    cores: float = 0.0


@contextmanager
def foreign_work(mesh: RunningMesh) -> Generator[Foreign]:
    """How many cores are busy, on average over the block, with neither the mesh nor this process: they disturb it."""
    pids = ["self", *map(str, mesh.pids().values())]

    def ticks() -> int:
        user, nice, system, _idle, _wait, irq, softirq, steal = map(
            int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        )
        own = sum(sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13])) for pid in pids)
        return user + nice + system + irq + softirq + steal - own

    found = Foreign()
    began_ticks, began_s = ticks(), time.monotonic()
    yield found
    found.cores = (ticks() - began_ticks) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - began_s)


def live(folder: Path, checkpoint: Path, shape: tuple[int, int, int], bundle: str, loads: Sequence[Load]) -> Live:
    """Serve a load on a fresh mesh."""
    log = folder / "events.log"
    prefill, decode, mixed = shape
    settings = {"SCHEDULER_EVENT_LOG": str(log), "SCHEDULER_BUNDLE": bundle}
    with running_mesh(folder, model=checkpoint, prefill=prefill, decode=decode, mixed=mixed, settings=settings) as mesh:
        anyio.run(play, mesh, [Load(0.3 * n, load.prompt[:128], 8) for n, load in enumerate(loads[:5])])
        mesh.wait_until_idle()
        with foreign_work(mesh) as foreign:
            client_s = anyio.run(play, mesh, loads)
    with EventLogReader(log) as read:
        decisions = (Decision(entry.now_s, entry.event, commands) for entry, commands in replay(read))
        return Live(read.header, recorded_run(decisions), client_s, foreign.cores)


def simulate(run: Live, model: LinearLatencyModel) -> dict[str, tuple[float, float]]:
    """TTFT and JCT of the same requests, by the scheduler's clock."""
    instances = [(profile, model) for profile in run.run.profiles]
    simulated = Simulator(core_of(run.header), instances, run.run.arrivals).run()
    recorded = run.run.result.requests
    return {
        name: times_s(twin)
        for live, twin in zip(recorded, simulated.requests, strict=True)
        if (name := live.request.request_id) in run.client_s
    }


def scheduler_s(run: Live) -> dict[str, tuple[float, float]]:
    """TTFT and JCT as the scheduler heard of them."""
    return {
        name: times_s(request)
        for request in run.run.result.requests
        if (name := request.request.request_id) in run.client_s
    }


def times_s(request: RequestRun) -> tuple[float, float]:
    assert request.ttft_s is not None
    assert request.jct_s is not None
    return request.ttft_s, request.jct_s


def way_s(run: Live) -> float:
    """What a client waits for its first token beside what the scheduler sees: HTTP, tokenizer, streams."""
    seen = scheduler_s(run)
    return median(run.client_s[name][0] - ttft_s for name, (ttft_s, _) in seen.items())


def compare(title: str, run: Live, model: LinearLatencyModel, way: float) -> float:
    """Print live beside simulated; the largest relative difference."""
    twins, heard, worst = simulate(run, model), scheduler_s(run), 0.0
    print(f"\n{title}: {len(twins)} requests; others kept {run.foreign_cores:.2f} cores busy")
    print(f"{'':14}{'client':>9}{'simulated':>11}{'':>9}{'scheduler':>12}{'simulated':>11}")
    for index, figure in enumerate(("TTFT", "JCT")):
        for percent in (50, 90):
            client = at(percent, (run.client_s[name][index] for name in twins))
            simulated = at(percent, (times[index] + way for times in twins.values()))
            seen = at(percent, (heard[name][index] for name in twins))
            inside = at(percent, (times[index] for times in twins.values()))
            worst = max(worst, abs(simulated / client - 1))
            print(
                f"{figure + f' p{percent}, s':14}{client:9.3f}{simulated:11.3f}{simulated / client - 1:+9.1%}"
                f"{seen:12.3f}{inside:11.3f}{inside / seen - 1:+9.1%}"
            )
    return worst


def at(percent: float, values: Iterable[float]) -> float:
    found = percentile(values, percent)
    assert found is not None
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", choices=sorted(MESHES), default="1P+1D")
    parser.add_argument("--bundle", default="fcfs")
    parser.add_argument("--requests", type=int, default=60, help="short ones in each run")
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second")
    parser.add_argument("--longs", type=int, nargs="*", default=[4096, 8192], help="prompt tokens of the long ones")
    parser.add_argument("--keep", type=Path, help="keep the event logs in this folder")
    arguments = parser.parse_args()
    print(heading(f"Simulated against live, Llama 82M bf16, {arguments.mesh}, {arguments.bundle}"))
    with tempfile.TemporaryDirectory() as name:
        checkpoint = write_checkpoint(Path(name) / "model", shape=LLAMA_82M, dtype="bfloat16")
        runs: dict[int, Live] = {}
        for seed in (FIT_SEED, TEST_SEED):
            folder = (arguments.keep or Path(name)) / f"seed-{seed}"
            folder.mkdir(parents=True)
            loads = draw(seed, arguments.requests, arguments.rate, arguments.longs)
            runs[seed] = live(folder, checkpoint, MESHES[arguments.mesh], arguments.bundle, loads)
    model, way = fitted_model(runs[FIT_SEED].run), way_s(runs[FIT_SEED])
    print(f"fitted to seed {FIT_SEED}: {model}; client to scheduler and back {way * 1e3:.1f} ms")
    compare(f"seed {FIT_SEED}, fitted to", runs[FIT_SEED], model, way)
    worst = compare(f"seed {TEST_SEED}, foretold", runs[TEST_SEED], model, way)
    limits = Limits()
    stands = limits.at_most("largest difference", worst, LIMIT)
    print(f"\nlargest difference of the run foretold: {worst:.1%} ({stands} of {LIMIT:.0%})")
    limits.end()


if __name__ == "__main__":
    main()
