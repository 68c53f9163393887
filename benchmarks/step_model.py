"""What the latency model predicts of steps that it was not fitted to, and what reporting own decode steps costs.

Usage: python benchmarks/step_model.py [--seconds 60] [--threads 1] [--seed 0] [--live] [--terms a_s=...]

A Llama of 82M parameters (random weights, bf16) times itself as at a worker's start, then serves steps as a mesh would
plan them: chunks alone, chunks beside decodes, and decodes that the instance makes by itself. Two refinements follow
from the same start: one hears of planned steps alone, the other of own decode steps too, 32 at a time. Both, the start
and a fit of everything that was served are asked for steps held out. ``--live`` serves from a mesh of one stand-in
engine instead, whose steps take the time that ``--terms`` say, and tells what was learnt of it. Prints JSON; exits 1 if
a refinement that hears of own decode steps predicts decodes worse than one that does not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from report import heading

from pdmesh.core.events import DecodeStepsDone, RequestFinished, StepDone
from pdmesh.core.instances.own_steps import OwnSteps
from pdmesh.decisions import Decision
from pdmesh.engine.runner import TorchEngine
from pdmesh.eventlog import EventLogReader, core_of, replay
from pdmesh.model import OWN_STEPS_PER_REPORT, Epoch, InstanceId, OwnDecodeSteps, RequestId, Role
from pdmesh.plans import ChunkDone
from pdmesh.policy.fit import fit
from pdmesh.policy.latency import ChunkShape, LinearLatencyModel, StepShape
from pdmesh.policy.latency_profile import self_measured
from pdmesh.policy.refine import Refinement
from pdmesh.profiles import parse_latency
from pdmesh.wire.messages import EventMessage
from pdmesh.worker.measuring import measure_at_start, step_s
from pdmesh_lab.sim.recorded import recorded_run
from pdmesh_lab.sim.samples import measured_steps
from pdmesh_testing.checkpoints import LLAMA_82M, write_checkpoint
from pdmesh_testing.mesh import RunningMesh, running_mesh
from pdmesh_testing.modelled import modelled_profile

#: Steps held out, by what is in them: (new tokens, tokens before them), (decodes, context of each).
HELD_OUT = {
    "prefill": [((96, 0), (0, 0)), ((384, 512), (0, 0)), ((200, 2048), (0, 0))],
    "decode": [((0, 0), (2, 700)), ((0, 0), (12, 200)), ((0, 0), (32, 150)), ((0, 0), (24, 400))],
    "mixed": [((48, 0), (24, 128)), ((160, 0), (32, 100)), ((100, 500), (4, 300)), ((256, 1000), (12, 200))],
}
OWN_STEPS_PER_ROUND = 8

#: Of a device whose steps of chunks and decodes cost more than their parts.
TERMS = "a_s=0.006,b_s=1.5e-4,decode_a_s=0.004,decode_s=2e-4,mixed_a_s=0.006,interference_s=1e-4"


def shape_of(chunk: tuple[int, int], decodes: tuple[int, int]) -> StepShape:
    chunks = (ChunkShape(*chunk),) if chunk[0] else ()
    return StepShape(chunks, decodes[0], decodes[0] * decodes[1])


class Follower:
    """A refinement, and whether it hears of own decode steps."""

    def __init__(self, start: LinearLatencyModel, *, hears_own: bool) -> None:
        self.refinement = Refinement(start)
        self.hears_own = hears_own

    def planned(self, shape: StepShape, seconds: float) -> None:
        self.refinement.observe(shape, seconds)

    def own(self, steps: OwnSteps) -> None:
        made = steps.take()
        if made is not None and self.hears_own:
            number = made.num_steps
            shape = StepShape((), made.num_tokens / number, made.num_context_tokens / number)
            self.refinement.observe(shape, made.duration_s / number)

    @property
    def model(self) -> LinearLatencyModel:
        self.refinement.look()
        return self.refinement.estimate


def serve(
    engine: TorchEngine, followers: Sequence[Follower], limit_s: float, rng: random.Random
) -> tuple[list[tuple[StepShape, float]], dict[StepShape, list[float]]]:
    """All steps that were served, with their times, and those of the steps held out, measured between them."""
    served: list[tuple[StepShape, float]] = []
    held_out: dict[StepShape, list[float]] = {shape_of(*what): [] for kind in HELD_OUT.values() for what in kind}
    waiting = list(held_out)
    began_s = time.perf_counter()
    while time.perf_counter() - began_s < limit_s:
        num_decodes, context = rng.choice((4, 8, 16, 32)), rng.choice((64, 128, 256))
        history = rng.choice((0, 0, 512, 1024))
        alone = shape_of((rng.choice((64, 128, 256, 512)), history), (0, 0))
        mixed = shape_of((rng.choice((32, 64, 128, 256)), history), (num_decodes, context))
        for shape in (alone, mixed):
            seconds = step_s(engine, shape)
            served.append((shape, seconds))
            for follower in followers:
                follower.planned(shape, seconds)
        own = [OwnSteps() for _ in followers]
        for index in range(OWN_STEPS_PER_ROUND):
            shape = shape_of((0, 0), (num_decodes, context + index))
            seconds = step_s(engine, shape)
            served.append((shape, seconds))
            for steps in own:
                steps.made(
                    num_tokens=num_decodes,
                    num_context_tokens=int(shape.num_decode_context_tokens),
                    duration_s=seconds,
                    began_s=0.0,
                    ended_s=seconds,
                )
        for follower, steps in zip(followers, own, strict=True):
            follower.own(steps)
        shape = waiting.pop(0)
        waiting.append(shape)
        held_out[shape].append(step_s(engine, shape))
    return served, held_out


def errors(model: LinearLatencyModel, held_out: dict[StepShape, list[float]]) -> dict[str, float]:
    """Mean relative error in percent, by what is in a step."""
    found: dict[str, float] = {}
    for kind, shapes in HELD_OUT.items():
        measured = [(shape, statistics.median(held_out[shape])) for shape in (shape_of(*what) for what in shapes)]
        found[kind] = round(100 * statistics.fmean(abs(model.step_s(s) / seconds - 1) for s, seconds in measured), 1)
    return found


def cost_us(work: Callable[[], object], number: int = 20_000) -> float:
    """The best of five rounds."""
    best_s = float("inf")
    for _ in range(5):
        began_s = time.perf_counter()
        for _ in range(number // 5):
            work()
        best_s = min(best_s, time.perf_counter() - began_s)
    return round(best_s / (number // 5) * 1e6, 2)


def cost_of_reports() -> dict[str, float]:
    """Of telling of one step: microseconds and bytes."""
    own = OwnSteps()

    def count() -> None:
        own.made(num_tokens=32, num_context_tokens=9000, duration_s=0.015, began_s=1.0, ended_s=1.015)
        if own.num_left <= 0:
            own.take()

    def told() -> StepDone:
        own.made(num_tokens=32, num_context_tokens=9000, duration_s=0.015, began_s=1.0, ended_s=1.015)
        chunk = ChunkDone(request_id=RequestId("0" * 32), epoch=Epoch(0), num_tokens=256, is_last=False)
        return StepDone(InstanceId("mixed-0"), 7, 0.05, (chunk,), 32, 9000, own.take(), 1.0, 1.05)

    with_own = told()
    alone = replace(with_own, own_steps=None)
    decoded = EventMessage.of(with_own)
    return {
        "one own step counted, us": cost_us(count),
        f"the same share of a report every {OWN_STEPS_PER_REPORT} steps, us": round(
            cost_us(lambda: EventMessage.of(with_own)) / OWN_STEPS_PER_REPORT, 2
        ),
        "StepDone with own steps encoded, us": cost_us(lambda: EventMessage.of(with_own)),
        "StepDone with own steps decoded, us": cost_us(lambda: decoded.event),
        "StepDone with own steps, bytes": len(bytes(decoded.fields)),
        "StepDone without, bytes": len(bytes(EventMessage.of(alone).fields)),
    }


# --- live -----------------------------------------------------------------------------------------------------------


async def _client(mesh: RunningMesh, rng: random.Random, until_s: float) -> int:
    """One request after the other; how many."""
    number = 0
    async with mesh.client() as client:
        while time.monotonic() < until_s:
            body = {
                "model": mesh.model,
                "prompt": [rng.randrange(33, 90) for _ in range(rng.choice((32, 96, 256, 480)))],
                "max_tokens": rng.choice((16, 48, 96)),
                "ignore_eos": True,
            }
            (await client.post("/v1/completions", json=body)).raise_for_status()
            number += 1
    return number


async def _load(mesh: RunningMesh, num_clients: int, seconds: float, seed: int) -> int:
    until_s = time.monotonic() + seconds
    clients = (_client(mesh, random.Random(seed + index), until_s) for index in range(num_clients))
    return sum(await asyncio.gather(*clients))


def live(given: LinearLatencyModel, text: str, seconds: float, seed: int) -> dict[str, object]:
    """What a mesh learns of a stand-in that takes the time that ``given`` says: read off the record of the run."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "events.log"
        settings = {"WORKER_ENGINE": "fake", "WORKER_FAKE_LATENCY": text, "SCHEDULER_EVENT_LOG": str(log)}
        with running_mesh(Path(folder), model=None, prefill=0, decode=0, mixed=1, settings=settings) as mesh:
            number = asyncio.run(_load(mesh, 24, seconds, seed))
        steps: list[StepDone] = []
        own: list[OwnDecodeSteps] = []
        with EventLogReader(log) as reader:
            core = core_of(reader.header)
            for entry in reader:
                core.handle(entry.event, entry.now_s)
                if isinstance(entry.event, StepDone | RequestFinished | DecodeStepsDone) and entry.event.own_steps:
                    own.append(entry.event.own_steps)
                if isinstance(entry.event, StepDone):
                    steps.append(entry.event)
            learnt = core.latency
        samples = measured_samples(log)
    fitted = fit(samples)
    equal = StepShape((ChunkShape(32, 0),), 24, 24 * 200)
    return {
        "requests": number,
        "planned steps": len(steps),
        "own steps": sum(part.num_steps for part in own),
        "terms": {
            name: {"given": one, "fitted to the record": round(two, 7)}
            for name, one, two in zip(
                LinearLatencyModel.__slots__, given.coefficients, fitted.coefficients, strict=True
            )
        },
        "a step of 32 tokens and 24 decodes, ms": {
            "given": round(1e3 * given.step_s(equal), 2),
            "learnt": round(1e3 * learnt.step_s(equal), 2),
            "fitted": round(1e3 * fitted.step_s(equal), 2),
        },
    }


def measured_samples(log: Path) -> list[tuple[StepShape, float]]:
    with EventLogReader(log) as reader:
        run = recorded_run(Decision(entry.now_s, entry.event, commands) for entry, commands in replay(reader))
    return measured_steps(run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of serving")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--live", action="store_true")
    parser.add_argument("--terms", default=TERMS, help="of the stand-in")
    options = parser.parse_args()
    if options.live:
        print(heading("A stand-in's step model, learnt live"))
        print(json.dumps(live(parse_latency(options.terms), options.terms, options.seconds, options.seed), indent=1))
        return
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_checkpoint(Path(folder) / "model", shape=LLAMA_82M, dtype="bfloat16")
        engine = TorchEngine(checkpoint, num_blocks=1365, dtype="bfloat16", num_threads=options.threads)
        began_s = time.perf_counter()
        steps = measure_at_start(engine)
        start_s = time.perf_counter() - began_s
        profile = replace(
            modelled_profile("m", Role.MIXED),
            kv_layout=engine.kv.layout,
            num_parameters=81_788_928,
            num_heads=12,
            measured_steps=steps,
        )
        start = self_measured(profile)
        assert start is not None
        followers = [Follower(start, hears_own=hears) for hears in (False, True)]
        served, held_out = serve(engine, followers, options.seconds, random.Random(options.seed))
    without, with_own = (errors(follower.model, held_out) for follower in followers)
    result = {
        "start": {"steps": len(steps), "seconds": round(start_s, 2)},
        "steps served": len(served),
        "held-out error, %": {
            "start": errors(start, held_out),
            "refined without own steps": without,
            "refined with own steps": with_own,
            "fitted to all": errors(fit(served), held_out),
        },
        "fitted": dict(zip(LinearLatencyModel.__slots__, fit(served).coefficients, strict=True)),
        "cost": cost_of_reports(),
    }
    print(heading("Steps held out, Llama 82M bf16"))
    print(json.dumps(result, indent=1))
    if with_own["decode"] > without["decode"] + 1:
        sys.exit("hearing of own decode steps made the prediction of decodes worse")


if __name__ == "__main__":
    main()
