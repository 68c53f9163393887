"""Deterministic simulation testing: the real services, on virtual time, under faults drawn from seeds.

    make dst SEEDS=1000
    python benchmarks/dst.py --first 5000 --seeds 1000      # other seeds
    python benchmarks/dst.py --show 408                     # one seed's timeline

A seed that breaks a law is cut down to what the failure needs, and its timeline is printed; the exit code is then 1.
``docs/testing.md`` says what is simulated and which laws are checked.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace

from pdmesh.testing.dst.drawing import draw
from pdmesh.testing.dst.plan import Plan
from pdmesh.testing.dst.run import Result, run
from pdmesh.testing.dst.shrink import shrink

#: Lines of a timeline that are printed; its end is what matters.
MAX_LINES = 400


def main() -> int:
    arguments = _arguments()
    if arguments.show is not None:
        result = run(draw(arguments.show), with_timeline=True)
        _print_run(result)
        return int(result.broken is not None)
    began_s = time.monotonic()
    num_events = num_tokens = num_faults = num_run = 0
    virtual_s = 0.0
    failing: list[int] = []
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        if time.monotonic() - began_s > arguments.limit_s or len(failing) == arguments.max_failures:
            break
        result = run(draw(seed))
        num_run += 1
        num_events += result.num_events
        num_tokens += result.num_tokens
        num_faults += len(result.plan.faults)
        virtual_s += result.virtual_s
        if result.broken is not None:
            failing.append(seed)
            print(f"seed {seed}: {result.broken}", flush=True)
            if not arguments.no_shrink:
                smallest = shrink(result.plan, result.broken.law)
                print(f"\nthe smallest plan found that breaks the law:\n{_described(smallest)}\n")
                _print_run(run(smallest, with_timeline=True))
        if num_run % 1000 == 0:
            print(f"{num_run} seeds, {len(failing)} failed, {time.monotonic() - began_s:.0f} s", flush=True)
    duration_s = time.monotonic() - began_s
    print(
        f"{num_run} seeds from {arguments.first} in {duration_s:.0f} s ({num_run / duration_s:.1f} a second): "
        f"{num_faults} faults, {num_events} scheduler events, {num_tokens} tokens, {virtual_s / 3600:.1f} hours of "
        f"virtual time; {len(failing)} failed{': ' + ', '.join(map(str, failing)) if failing else ''}"
    )
    return int(bool(failing))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first one")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="stop after so many seconds")
    parser.add_argument("--max-failures", type=int, default=1, help="stop after so many failing seeds")
    parser.add_argument("--no-shrink", action="store_true", help="only say which law a failing seed broke")
    parser.add_argument("--show", type=int, metavar="SEED", help="print the timeline of one seed")
    return parser.parse_args()


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
