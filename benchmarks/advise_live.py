"""`pdmesh pool advise`, measured live: is the better split found, and does it bring what was foretold?

Usage: python benchmarks/advise_live.py [--seconds 60] [--per-s 3.0] [--slo-ttft 1.0] [--costs TERMS]

A mesh of processes with the stand-in engine, whose steps take what ``--costs`` says, so that two cores suffice. It has
1 prefill and 3 decode instances, and gets long prompts with short answers: more than one instance can prefill, so that
another split is known to be better. `pool advise` looks at the scheduler's own event log; what it proposes is typed,
and the same requests come again. Printed are the figures foretold and measured, before and after, and how the measured
ratio of after to before stands to the foretold one.

Exit code 1 if it proposes nothing or no split with more instances that prefill, if requests in time do not rise, or if
neither goodput (requests in time a second) nor the median TTFT changes by the foretold factor within 15 %.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import anyio

from pdmesh_testing.timed import poisson, send, share_in_time, timed_mesh, ttft_p50_s

COSTS = "a_s=0.01,b_s=0.001,decode_a_s=0.01,decode_s=0.0001"

#: Of the ratio of after to before.
MOST_OFF = 0.15


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--per-s", type=float, default=3.0)
    parser.add_argument("--slo-ttft", type=float, default=1.0)
    parser.add_argument("--costs", default=COSTS)
    options = parser.parse_args()
    load = poisson(7, per_s=options.per_s, seconds=options.seconds, prompt=range(250, 500), num_output_tokens=16)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with timed_mesh(folder, options.costs, prefill=1, decode=3, max_num_seqs=32) as mesh:
            before = anyio.run(send, mesh, load)
            target = ("--slo-ttft", str(options.slo_ttft), "--last", str(options.seconds), "--output", "json")
            advice: dict[str, Any] = json.loads(mesh.pdmesh("pool", "advise", *target))
            for command in advice["commands"]:
                print(command)
                mesh.pdmesh(*command.split()[1:])
            after = anyio.run(send, mesh, load)
    best = advice["best"]
    if best is None:
        print("missed: nothing is proposed")
        return 1
    foretold = [_of(advice["now"]), _of(best)]
    measured = [(ttft_p50_s(each), share_in_time(each, options.slo_ttft)) for each in (before, after)]
    wrong: list[str] = []
    if best["pools"]["prefill"] <= 1 and not best["pools"]["mixed"]:
        wrong.append("the better split is not found")
    print(f"{len(load)} requests, {advice['num_requests']} of them simulated")
    print(f"{'':24}{'before':>10}{'after':>10}{'ratio':>10}")
    kept: list[bool] = []
    for index, (name, unit) in enumerate((("median TTFT", "s"), ("requests in time", ""))):
        factors: list[float] = []
        for what, figures in (("foretold", foretold), ("measured", measured)):
            (one, other) = (each[index] for each in figures)
            factors.append(other / one if one else float("inf"))
            print(f"{name + ' ' + what:24}{one:>9.3f}{unit:1}{other:>9.3f}{unit:1}{factors[-1]:>10.3g}")
        off = factors[1] / factors[0] - 1
        kept.append(abs(off) <= MOST_OFF)
        print(f"{'':24}measured is {off:+.0%} off what was foretold ({MOST_OFF:.0%})")
    if measured[1][1] <= measured[0][1]:
        wrong.append("no more requests are in time")
    if not any(kept):
        wrong.append("neither is as foretold")
    print(f"missed: {'; '.join(wrong)}" if wrong else "all limits kept")
    return 1 if wrong else 0


def _of(foretold: dict[str, Any]) -> tuple[float, float]:
    """Median TTFT and share in time."""
    return foretold["figures"]["all"]["ttft_s"]["p50"], foretold["attainment"]


if __name__ == "__main__":
    sys.exit(main())
