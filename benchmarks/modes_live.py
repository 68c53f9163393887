"""Both batching modes in turns on one live instance: does what is predicted of them have the sign of what is measured?

Usage: python benchmarks/modes_live.py [--engine model|fake] [--mixes 128/128 ...] [--clients 64] [--window-s 4]
                                       [--rounds 30 | --minutes M] [--costs TERMS]

A mesh of real processes with one instance that does both, and so many clients, each of which asks again as soon as it
is answered. The mode is set over and over as a b b a (`pdmesh policy set`'s own call; a is mb, b is eb at the
threshold of the theory), for ``--window-s`` each, with the load going on; a *round* is one a b b a, whose drift cancels
to first order. Lengths of prompts and outputs are geometric, with the means that ``--mixes`` names. The engine is the
82M-parameter model, or the stand-in with steps that take what ``--costs`` says.

What is compared is throughput, by *work*: the seconds that the prompt tokens and decodes of the steps that ran are
predicted to cost, without the constants of steps. A request costs the same of it under any mode. So a window is judged
by the time for each decode that was not work, beside the mean work for each decode of the whole run: which lengths came
by chance does not matter, nor how much of the run's prompts a window had. It is counted in the scheduler's event log,
on the instance's clock, from the second `SETTLE_S` of a window on; under eb over whole cycles. Predicted is what the
scheduler says of its instance while it is under eb, from what it has measured itself.

Of each mix: the log ratio of eb over mb with its 95 % interval over rounds, and the prediction. Something else on the
machine may spoil a round: so means are trimmed (a tenth of the rounds at each end, and as many in the interval's
deviation: Yuen's). Exits 1 if an interval excludes 0 and the prediction has the other sign, or if a mix has no two
rounds with a whole cycle in every window: then make these longer. A run takes rounds x 4 x window a mix, and half a
minute; ``--minutes`` has as many rounds of each mix as fit.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import anyio
import httpx
from report import Limits, heading

from pdmesh.config import SecurityConfig
from pdmesh.core.batching.modes import BatchingView
from pdmesh.core.commands import Command, RunStep
from pdmesh.core.events import DecodeStepsDone, Event, InstanceJoined, RequestFinished, StepDone
from pdmesh.core.operator_events import BatchingChangeRequested
from pdmesh.eventlog import EventLogReader, core_of
from pdmesh.model import OwnDecodeSteps
from pdmesh.plans import StepPlan
from pdmesh.policy.latency import ChunkShape, LinearLatencyModel, StepShape
from pdmesh.wire.admin import ask_scheduler
from pdmesh.wire.messages import SetBatching
from pdmesh_testing.checkpoints import LLAMA_82M, TINY, write_checkpoint
from pdmesh_testing.mesh import RunningMesh, running_mesh

#: Of the stand-in, unless given: costs with which exclusive batching wins by about 8 % with 64 clients and 128/128.
BOUND_BY_BANDWIDTH = "a_s=0.006,b_s=0.00015,decode_a_s=0.004,decode_s=0.0002,mixed_a_s=0.006,interference_s=0.0001"

ROUND = ("mb", "eb", "eb", "mb")
SETTLE_S = 1.0

#: Before the first window: the lengths and steps from which modes are predicted are observed.
WARM_UP_S = 12.0

#: Of a mix, beside its windows: the mesh starts, warms up, stops, and its log is read.
BESIDE_S = 40.0

#: A target that nobody has, so that throughput alone decides.
NO_TARGET = "10000"

#: Quantile 0.975 of Student's distribution for 1, 2, ... degrees of freedom; the normal's beyond.
_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10)


@dataclass(frozen=True, slots=True)
class Mix:
    """Mean lengths, in tokens."""

    prompt: int
    output: int

    @classmethod
    def parsed(cls, text: str) -> Mix:
        prompt, _, output = text.partition("/")
        return cls(int(prompt), int(output))


# --- the load ---


def geometric(rng: random.Random, mean: int, most: int) -> int:
    return min(most, 1 + int(math.log(1 - rng.random()) / math.log(1 - 1 / mean)))


async def keep_asking(client: httpx.AsyncClient, mesh: RunningMesh, mix: Mix, seed: int) -> None:
    rng = random.Random(seed)
    while True:
        prompt = [rng.randrange(TINY.vocab_size) for _ in range(geometric(rng, mix.prompt, 8 * mix.prompt))]
        output = geometric(rng, mix.output, 8 * mix.output)
        body = {"model": mesh.model, "prompt": prompt, "max_tokens": output, "ignore_eos": True}
        (await client.post("/v1/completions", json=body)).raise_for_status()


async def take_turns(mesh: RunningMesh, mix: Mix, clients: int, rounds: int, window_s: float) -> None:
    """Serve the load, and set the modes as `ROUND` has them."""
    security = replace(SecurityConfig(), mesh_token=mesh.record.mesh_token)

    async def set_mode(mode: str) -> None:
        await ask_scheduler(mesh.record.scheduler_address, security, SetBatching(batching=mode))

    async with mesh.client() as client, anyio.create_task_group() as tasks:
        for number in range(clients):
            tasks.start_soon(keep_asking, client, mesh, mix, number)
        await set_mode("eb")
        await anyio.sleep(WARM_UP_S)
        for mode in ROUND * rounds:
            await set_mode(mode)
            await anyio.sleep(window_s)
        await set_mode("mb")
        tasks.cancel_scope.cancel()


# --- what its log says ---


class Span(NamedTuple):
    """A planned step, or decode steps that the instance made by itself, on its clock."""

    began_s: float
    ended_s: float
    work: StepShape
    num_steps: int = 1


class Tally(NamedTuple):
    """Of a window: its length, the work in it, and the decodes."""

    wall_s: float
    work_s: float
    num_decodes: float


@dataclass(slots=True)
class Window:
    """A time in one mode, without its first `SETTLE_S`."""

    mode: str
    spans: list[Span] = field(default_factory=list[Span])
    view: BatchingView | None = None  # of the instance at its end

    @property
    def is_whole(self) -> bool:
        """Whether there is anything to judge it by: under eb, a cycle."""
        first, last = self._ends()
        return last > first

    def tally(self, model: LinearLatencyModel) -> Tally:
        """Under eb from the beginning of a prefill phase to that of the last one. Only of a whole window."""
        first, last = self._ends()
        inside = self.spans[first:last]
        return Tally(
            wall_s=self.spans[last].began_s - self.spans[first].began_s,
            work_s=sum(span.num_steps * token_s(model, span.work) for span in inside),
            num_decodes=sum(span.num_steps * span.work.num_decodes for span in inside),
        )

    def _ends(self) -> tuple[int, int]:
        if self.mode == "mb":
            return 0, len(self.spans) - 1
        phases = [
            index
            for index, span in enumerate(self.spans)
            if index and span.work.chunks and not self.spans[index - 1].work.chunks
        ]
        return (phases[0], phases[-1]) if phases else (0, 0)


def token_s(model: LinearLatencyModel, shape: StepShape) -> float:
    """What the tokens of a step cost by themselves."""
    return replace(model, a_s=0.0, decode_a_s=0.0, mixed_a_s=0.0, interference_s=0.0).step_s(shape)


def windows_of(log: Path) -> tuple[list[Window], LinearLatencyModel]:
    """The windows of a run, and what its scheduler knew of steps in the end. Replays the log."""
    plans: dict[int, StepPlan] = {}
    windows: list[Window] = []
    opened_s, instance_id = 0.0, None
    with EventLogReader(log) as read:
        core = core_of(read.header)
        for entry in read:
            event = entry.event
            if isinstance(event, InstanceJoined):
                instance_id = event.profile.instance_id
            if isinstance(event, BatchingChangeRequested):
                if windows and instance_id is not None:
                    windows[-1].view = core.batching_of(instance_id)
                windows.append(Window(event.batching))
                opened_s = entry.now_s
            note_plans(plans, core.handle(event, entry.now_s))
            if windows and entry.now_s >= opened_s + SETTLE_S:
                windows[-1].spans += spans_of(event, plans)
    return windows[1:-1], core.latency  # without the warm-up, and what came after the last


def note_plans(plans: dict[int, StepPlan], commands: Sequence[Command]) -> None:
    for command in commands:
        if isinstance(command, RunStep):
            plans[command.plan.plan_id] = command.plan


def spans_of(event: Event, plans: dict[int, StepPlan]) -> Iterator[Span]:
    if isinstance(event, StepDone | DecodeStepsDone | RequestFinished) and event.own_steps is not None:
        yield own_span(event.own_steps)
    if isinstance(event, StepDone) and (event.chunks or event.num_decodes):
        computed = {(chunk.request_id, chunk.epoch): chunk.num_tokens for chunk in event.chunks}
        chunks = tuple(
            ChunkShape(chunk.num_tokens, chunk.start)
            for chunk in plans.pop(event.plan_id).chunks
            if computed.get((chunk.request_id, chunk.epoch))
        )
        yield Span(event.began_s, event.ended_s, StepShape(chunks, event.num_decodes, event.num_decode_context_tokens))


def own_span(own: OwnDecodeSteps) -> Span:
    mean = StepShape((), own.num_tokens / own.num_steps, own.num_context_tokens / own.num_steps)
    return Span(own.began_s, own.ended_s, mean, own.num_steps)


# --- the comparison ---


@dataclass(frozen=True, slots=True)
class Verdict:
    """Log ratios of eb over mb."""

    measured: float
    half_width: float  # of the 95 % interval
    predicted: float
    num_rounds: int  # with a whole cycle in every window

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes 0."""
        return abs(self.measured) > self.half_width

    @property
    def agrees(self) -> bool:
        return not self.is_clear or (self.measured > 0) == (self.predicted > 0)


class NothingToJudge(Exception):
    """Why a run says nothing."""


def verdict(windows: Sequence[Window], model: LinearLatencyModel) -> Verdict:
    """Raises NothingToJudge."""
    size = len(ROUND)
    rounds = [windows[at : at + size] for at in range(0, len(windows) - size + 1, size)]
    tallies = [[window.tally(model) for window in turns] for turns in rounds if all(w.is_whole for w in turns)]
    if len(tallies) < 2:
        raise NothingToJudge(
            f"{len(tallies)} of {len(rounds)} rounds have a whole cycle in all windows: make these longer"
        )
    # Seconds that a decode takes with its share of all else, had every window had the same prompts and outputs.
    every = [tally for turns in tallies for tally in turns]
    mean_work_s = sum(tally.work_s for tally in every) / sum(tally.num_decodes for tally in every)
    ratios: list[float] = []
    for turns in tallies:
        a, b, c, d = (-math.log(mean_work_s + (tally.wall_s - tally.work_s) / tally.num_decodes) for tally in turns)
        ratios.append((b + c - a - d) / 2)
    gains = [view.gain for window in windows if window.mode == "eb" and (view := window.view) and view.gain is not None]
    if not gains:
        raise NothingToJudge("nothing was predicted: the windows are too short, or there are too few clients")
    measured, half_width = trimmed(ratios)
    return Verdict(measured, half_width, math.log1p(statistics.median(gains)), len(ratios))


def trimmed(values: Sequence[float]) -> tuple[float, float]:
    """The mean without a tenth of two values or more at each end, and half of its 95 % interval (Yuen, 1974)."""
    cut = len(values) // 10
    line = sorted(values)
    kept = line[cut : len(line) - cut]
    winsorised = [kept[0]] * cut + kept + [kept[-1]] * cut
    freedom = len(kept) - 1
    quantile = _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 2.0
    deviation = statistics.stdev(winsorised) * len(values) / len(kept)
    return statistics.mean(kept), quantile * deviation / math.sqrt(len(values))


def measure(mix: Mix, options: argparse.Namespace) -> Verdict:
    is_fake = options.engine == "fake"
    settings = {
        "SCHEDULER_REFUSES_EARLY": "false",
        "SCHEDULER_MAX_QUEUE_S": "900",
        "POLICY_SLO_TPOT_S": NO_TARGET,
        "POLICY_SLO_TTFT_S": NO_TARGET,
        "WORKER_MAX_NUM_SEQS": str(options.clients),
        **({"WORKER_ENGINE": "fake", "WORKER_FAKE_LATENCY": options.costs} if is_fake else {}),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log, model = (options.keep or folder) / f"{mix.prompt}-{mix.output}.log", folder / "model"
        model.mkdir()
        write_checkpoint(model, architecture="llama", shape=TINY if is_fake else LLAMA_82M, seed=1)
        settings["SCHEDULER_EVENT_LOG"] = str(log)
        with running_mesh(folder, model=model, prefill=0, decode=0, mixed=1, settings=settings) as mesh:
            anyio.run(take_turns, mesh, mix, options.clients, options.rounds, options.window_s)
        return verdict(*windows_of(log))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("model", "fake"), default="model")
    parser.add_argument("--costs", default=BOUND_BY_BANDWIDTH, help="of the stand-in's steps")
    parser.add_argument("--mixes", nargs="+", type=Mix.parsed, default=[Mix(256, 64), Mix(128, 128), Mix(32, 224)])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--minutes", type=float, help="of the whole run, instead of --rounds")
    parser.add_argument("--window-s", type=float, default=4.0)
    parser.add_argument("--keep", type=Path, help="leave the event logs in this folder")
    options = parser.parse_args()
    if options.minutes is not None:
        of_mix_s = 60 * options.minutes / len(options.mixes) - BESIDE_S
        options.rounds = int(of_mix_s / (len(ROUND) * options.window_s))
    if options.rounds < 2 or options.window_s < 2 * SETTLE_S:
        parser.error(f"an interval takes 2 rounds, and a window {2 * SETTLE_S:g} s")
    print(heading("eb over mb, live, in turns"))
    engine = f"stand-in, {options.costs}" if options.engine == "fake" else "82M parameters"
    print(f"{engine}; {options.clients} clients; {options.rounds} rounds of 4 x {options.window_s:g} s", flush=True)
    limits, num_rounds = Limits(), 0
    for mix in options.mixes:
        began_s = time.perf_counter()
        try:
            found = measure(mix, options)
        except NothingToJudge as reason:
            limits.at_least(f"anything of {mix.prompt}/{mix.output}", 0.0, 1.0)
            print(f"{mix.prompt:>5}/{mix.output:<5} MISSED: {reason}", flush=True)
            continue
        num_rounds += found.num_rounds
        limits.at_least(f"the sign of {mix.prompt}/{mix.output}", float(found.agrees), 1.0)
        print(
            f"{mix.prompt:>5}/{mix.output:<5} measured {found.measured:+.2%} +- {found.half_width:.2%}"
            f" ({'excludes' if found.is_clear else 'includes'} 0), predicted {found.predicted:+.2%}:"
            f" {'ok' if found.agrees else 'MISSED'}  {found.num_rounds} rounds, {time.perf_counter() - began_s:.0f} s",
            flush=True,
        )
    print(f"{num_rounds} rounds in all", flush=True)
    limits.end()


if __name__ == "__main__":
    main()
