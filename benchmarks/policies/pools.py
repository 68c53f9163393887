"""Separate pools or mixed instances: one load for which each is better, and whether `pdmesh pool advise` knows.

The 82M-parameter model in bf16 on two instances of one thread: 1P+1D, then two mixed ones. Both serve the same two
loads, Poisson streams from one HTTP client. *prompts*: long prompts, short answers, and a tight target for the time
per output token. *answers*: short prompts, and more long answers than one instance decodes in time.

Rates and targets are multiples of the least that the first mesh takes for lone requests and for `FULL_BATCH` streams
at once, so that they are as hard on any machine. Requests carry no targets: their times are judged afterwards. From the
event log of each run, the advice must be the pools that had more requests in time, or as many within `TIE`.

    python -m benchmarks.policies.pools [--requests 36] [--seed 1]
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import anyio

from benchmarks.harness.report import Limits, heading, quantile
from pdmesh_testing.checkpoints import LLAMA_82M, write_checkpoint
from pdmesh_testing.mesh import RunningMesh, running_mesh
from pdmesh_testing.timed import TimedAnswer, TimedRequest, poisson, send

POOLS: Mapping[str, Mapping[str, int]] = {
    "1P+1D": {"prefill": 1, "decode": 1, "mixed": 0},
    "2M": {"prefill": 0, "decode": 0, "mixed": 2},
}

#: Streams at once that measure how fast an instance decodes a large batch.
FULL_BATCH = 16

#: Requests of each kind that are sent one after the other.
NUM_ALONE = 4

#: Difference between shares of requests in time below which pools are alike.
TIE = 0.02


class Kind(NamedTuple):
    """A kind of load. ``busy``: share of one instance's time that its prompts take, or its decodes if it ``decodes``.

    ``ttft`` and ``tpot``: targets over the times of lone requests.
    """

    prompt: range
    num_output_tokens: int
    decodes: bool
    busy: float
    ttft: float
    tpot: float


#: The kinds of load by the pools that are better for them.
KINDS: Mapping[str, Kind] = {
    "1P+1D": Kind(range(250, 450), 32, decodes=False, busy=0.95, ttft=15.0, tpot=2.1),
    "2M": Kind(range(16, 48), 96, decodes=True, busy=1.5, ttft=20.0, tpot=3.2),
}


class Load(NamedTuple):
    """Requests and their targets, in seconds."""

    requests: Sequence[TimedRequest]
    ttft_s: float = 0.0
    tpot_s: float = 0.0

    def tpots_s(self, answered: Sequence[TimedAnswer]) -> list[float]:
        return [(each.duration_s - each.ttft_s) / (self.requests[0].num_output_tokens - 1) for each in answered]


def calibrated(mesh: RunningMesh, kind: Kind, number: int, seed: int) -> Load:
    """Make a load for the speed of an idle mesh."""
    middle, num_tokens = kind.prompt[len(kind.prompt) // 2], kind.num_output_tokens
    alone = Load([TimedRequest(0.0, middle, num_tokens)])
    answered = [anyio.run(send, mesh, alone.requests)[0] for _ in range(NUM_ALONE)]
    needs_s = ttft_s = min(each.ttft_s for each in answered)
    tpot_s = min(alone.tpots_s(answered))
    if kind.decodes:
        full = [anyio.run(send, mesh, [*alone.requests] * FULL_BATCH) for _ in range(2)]
        needs_s = min(max(each.duration_s for each in answers) for answers in full) / FULL_BATCH
    per_s = kind.busy / needs_s
    requests = poisson(seed, per_s=per_s, seconds=number / per_s, prompt=kind.prompt, num_output_tokens=num_tokens)
    print(f"alone: TTFT {ttft_s:.3f} s, TPOT {1e3 * tpot_s:.1f} ms; {len(requests)} requests, {per_s:.2f} a second")
    return Load(requests, kind.ttft * ttft_s, kind.tpot * tpot_s)


def advised(mesh: RunningMesh, load: Load, log: Path) -> Mapping[str, int]:
    """Return the pools that the advice for the load, with which the log ends, recommends."""
    last_s = load.requests[-1].at_s - load.requests[0].at_s + 0.5
    options = {"log": log, "last": last_s, "slo-ttft": load.ttft_s, "slo-tpot": load.tpot_s, "output": "json"}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    advice = json.loads(mesh.pdmesh("pool", "advise", *words))
    pools: Mapping[str, int] = (advice["best"] or advice["now"])["pools"]
    return pools


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=36, help="of each load, in the mean")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(heading("Separate pools or mixed instances, Llama 82M bf16"), flush=True)
    loads, shares, advice = dict[str, Load](), dict[tuple[str, str], float](), dict[tuple[str, str], str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_checkpoint(folder / "model", shape=LLAMA_82M, dtype="bfloat16")
        for pools, counts in POOLS.items():
            log, copied = folder / f"{pools}.log", folder / "copied.log"
            settings = {
                "GATEWAY_PREFIX_REUSE": "off",  # all prompts begin alike
                "WORKER_NUM_THREADS": "1",
                "SCHEDULER_MAX_QUEUE_S": "600",
                "SCHEDULER_EVENT_LOG": str(log),
            }
            with running_mesh(folder / pools, model=model, settings=settings, **counts) as mesh:
                loads = loads or {
                    better: calibrated(mesh, kind, options.requests, options.seed) for better, kind in KINDS.items()
                }
                for better, load in loads.items():
                    answered = anyio.run(send, mesh, load.requests)
                    shutil.copy(log, copied)
                    best = advised(mesh, load, copied)
                    what, tpots_s = "answers" if KINDS[better].decodes else "prompts", load.tpots_s(answered)
                    ttfts_s = [each.ttft_s for each in answered]
                    in_time = [
                        ttft_s <= load.ttft_s and tpot_s <= load.tpot_s
                        for ttft_s, tpot_s in zip(ttfts_s, tpots_s, strict=True)
                    ]
                    shares[better, pools] = fmean(in_time)
                    advice[better, pools] = next((name for name, each in POOLS.items() if each == best), str(best))
                    print(
                        f"{what} on {pools}: {fmean(in_time):.1%} in time; TTFT p50 {quantile(ttfts_s, 0.5):.2f}, p90 "
                        f"{quantile(ttfts_s, 0.9):.2f} s (target {load.ttft_s:.2f}); TPOT p50 "
                        f"{1e3 * quantile(tpots_s, 0.5):.0f}, p90 {1e3 * quantile(tpots_s, 0.9):.0f} ms (target "
                        f"{1e3 * load.tpot_s:.0f}); advice: {advice[better, pools]}",
                        flush=True,
                    )
    limits = Limits()
    for better in KINDS:
        (worse,) = POOLS.keys() - {better}
        limits.at_least(f"{better} over {worse}", shares[better, better] - shares[better, worse], TIE)
        for pools in POOLS:
            share = shares.get((better, advice[better, pools]), 0.0)
            limits.at_least(f"advice for {better} on {pools}", share, max(shares[better, each] for each in POOLS) - TIE)
    limits.end()


if __name__ == "__main__":
    main()
