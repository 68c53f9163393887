"""Hostile input: 10,000 cases each for the HTTP edge, the gRPC edge and the internal streams.

    python -m benchmarks.faults.fuzz http | grpc | frames [--cases 10000] [--seed 0]

Everything runs in this process, on loopback, so that a crash or a traceback of any service is seen. Exit code 1 if one
case did not hold; a case that failed is printed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import anyio

from pdmesh_testing.fuzz import Report
from pdmesh_testing.fuzz_targets import TARGETS


async def run(target: str, num_cases: int, seed: int) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        return await TARGETS[target](Path(folder), num_cases=num_cases, seed=seed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    began_s = time.monotonic()
    report = anyio.run(run, arguments.target, arguments.cases, arguments.seed)
    for failure in report.failures[:20]:
        print(failure)
    print(f"{arguments.target}: {report}; seed {arguments.seed}, {time.monotonic() - began_s:.0f} s")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
