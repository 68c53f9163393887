"""Deterministic simulation testing: the real services, on virtual time, under faults drawn from seeds.

    make dst SEEDS=1000
    python -m benchmarks.simulation.dst --first 5000 --seeds 1000      # other seeds
    python -m benchmarks.simulation.dst --processes 2        # on two cores
    python -m benchmarks.simulation.dst --only spread        # seeds whose contexts are spread; also states, tiers
    python -m benchmarks.simulation.dst --show 408 # one seed's timeline

The first seed that breaks a law is cut down to what the failure needs, and its timeline is printed; the exit code is
then 1.
``docs/testing/simulation.md`` says what is simulated and which laws are checked.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count, islice
from multiprocessing import get_context

from pdmesh_testing.dst.drawing import draw
from pdmesh_testing.dst.plan import Plan
from pdmesh_testing.dst.run import Result, run
from pdmesh_testing.dst.shrink import shrink

#: Lines of a timeline that are printed; its end is what matters.
MAX_LINES = 400


#: What some plans alone have, and the field of a plan that says so.
PLANS = {"tiers": "num_offload_granules", "spread": "range_tokens", "states": "num_frames"}

#: Seeds that a process takes at a time.
BATCH = 20


@dataclass(slots=True)
class StepTotals:
    """What some seeds came to."""

    num_seeds: int = 0
    num_faults: int = 0
    num_events: int = 0
    num_tokens: int = 0
    virtual_s: float = 0.0
    broken: dict[int, str] = field(default_factory=dict[int, str])  # seeds, and what they broke

    def add(self, other: StepTotals) -> None:
        self.num_seeds += other.num_seeds
        self.num_faults += other.num_faults
        self.num_events += other.num_events
        self.num_tokens += other.num_tokens
        self.virtual_s += other.virtual_s
        self.broken |= other.broken


def main() -> int:
    arguments = _arguments()
    if arguments.show is not None:
        result = run(draw(arguments.show), with_timeline=True)
        _print_run(result)
        return int(result.broken is not None)
    began_s = time.monotonic()
    total = StepTotals()
    with ExitStack() as stack:
        for tally in _tallies(arguments, stack):
            total.add(tally)
            for seed, broken in sorted(tally.broken.items()):
                print(f"seed {seed}: {broken}", flush=True)
            if total.num_seeds % 1000 < tally.num_seeds:
                seconds = time.monotonic() - began_s
                print(f"{total.num_seeds} seeds, {len(total.broken)} failed, {seconds:.0f} s", flush=True)
            if len(total.broken) >= arguments.max_failures or time.monotonic() - began_s > arguments.limit_s:
                break
    duration_s = time.monotonic() - began_s
    failed = "".join(f" {seed}" for seed in sorted(total.broken))
    print(
        f"{total.num_seeds} seeds from {arguments.first} in {duration_s:.0f} s ({total.num_seeds / duration_s:.1f} a "
        f"second): {total.num_faults} faults, {total.num_events} scheduler events, {total.num_tokens} tokens, "
        f"{total.virtual_s / 3600:.1f} hours of virtual time; {len(total.broken)} failed{failed and ':'}{failed}"
    )
    if total.broken and not arguments.no_shrink:
        _print_smallest(draw(min(total.broken)))
    return int(bool(total.broken))


def _tallies(arguments: argparse.Namespace, stack: ExitStack) -> Iterator[StepTotals]:
    """Of batches of seeds, in order, by as many processes as asked for, which end with ``stack``."""
    seeds: Iterator[int] = count(arguments.first)
    if arguments.only:
        field = PLANS[arguments.only]
        seeds = filter(lambda seed: getattr(draw(seed), field) > 0, seeds)
    seeds = islice(seeds, arguments.seeds)
    batches = iter(lambda: list(islice(seeds, BATCH)), [])
    if arguments.processes == 1:
        yield from map(_tally, batches)
        return
    executor = ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn"))
    stack.callback(executor.shutdown, cancel_futures=True)
    under_way: deque[Future[StepTotals]] = deque()
    for batch in batches:
        under_way.append(executor.submit(_tally, batch))
        if len(under_way) > 2 * arguments.processes:
            yield under_way.popleft().result()
    for future in under_way:
        yield future.result()


def _tally(seeds: Iterable[int]) -> StepTotals:
    tally = StepTotals()
    for seed in seeds:
        result = run(draw(seed))
        tally.num_seeds += 1
        tally.num_faults += len(result.plan.faults)
        tally.num_events += result.num_events
        tally.num_tokens += result.num_tokens
        tally.virtual_s += result.virtual_s
        if result.broken is not None:
            tally.broken[seed] = str(result.broken)
    return tally


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first one")
    parser.add_argument("--only", choices=PLANS, help="take only seeds with offload tiers, spread contexts, or states")
    parser.add_argument("--processes", type=int, default=1, help="that share them")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="stop after so many seconds")
    parser.add_argument("--max-failures", type=int, default=1, help="stop after so many failing seeds")
    parser.add_argument("--no-shrink", action="store_true", help="only say which law a failing seed broke")
    parser.add_argument("--show", type=int, metavar="SEED", help="print the timeline of one seed")
    return parser.parse_args()


def _print_smallest(plan: Plan) -> None:
    broken = run(plan).broken
    assert broken is not None, "the same plan runs the same way"
    smallest = shrink(plan, broken.law)
    print(f"\nthe smallest plan found that breaks the law of seed {plan.seed}:\n{_described(smallest)}\n")
    _print_run(run(smallest, with_timeline=True))


def _described(plan: Plan) -> str:
    bare = replace(plan, asks=(), faults=())
    return "\n".join([str(bare), *(f"  {ask}" for ask in plan.asks), *(f"  {fault}" for fault in plan.faults)])


def _print_run(result: Result) -> None:
    if len(result.timeline) > MAX_LINES:
        print(f"... {len(result.timeline) - MAX_LINES} lines before these")
    print("\n".join(result.timeline[-MAX_LINES:]))
    print(result.broken or "every law held", flush=True)


if __name__ == "__main__":
    sys.exit(main())
