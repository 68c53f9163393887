"""Five times the load that a mesh can take: is as much served within its target, and how long do refusals take?

    python benchmarks/overload.py [--seconds 15] [--rounds 2] [--target-s 2] [--prefill 1] [--decode 1] [--no-timings]

Real processes with the 82M checkpoint of the other benchmarks. Requests have prompts of 32 to 96 tokens and a target
for their first token, and come as a Poisson stream, each on a connection of its own. First a closed loop tells what the
mesh can do; then the rate near that is searched at which most requests a second come within their targets (*goodput*);
then that rate and five times it take turns. Goodput is the gateway's own count (`pdmesh:request_slo`), over each window
after a few seconds at its rate; so are the times of refusals (`pdmesh:request_refusal_seconds`), from a request's head
to its answer, with quantiles interpolated in its buckets.

Exit code 1 if goodput at five times the load is below 0.95 of the peak's, if the 99th percentile of refusals is above
20 ms (not judged with ``--no-timings``), or if any answer is neither 200 nor 429 with Retry-After.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import re
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from report import Limits, heading

from pdmesh_testing.checkpoints import LLAMA_82M, write_checkpoint
from pdmesh_testing.mesh import RunningMesh, running_mesh

OVERLOAD = 5.0
LEAST_SHARE = 0.95
MAX_REFUSAL_S = 0.020

#: Rates that are tried for the peak, as shares of what the closed loop reached.
SHARES = (0.8, 1.0, 1.25, 1.5)
#: The peak is the lowest of them at which this share of the most is served within target: beyond it nothing is gained.
PEAK_SHARE = 0.97
#: At a rate before its window begins, for the mesh to have learnt its pace.
SETTLE_S = 4.0
CLOSED_LOOP_S = 8.0
CLOSED_LOOP_CLIENTS = 16

PROMPT_TOKENS = (32, 96)
OUTPUT_TOKENS = 8

#: Unlike ones that a client has.
NUM_REQUESTS = 500

#: No answer takes longer: it is lost.
ANSWER_LIMIT_S = 60.0

_MET = re.compile(r'^pdmesh:request_slo_total\{.*met="true".*\} (\S+)$', re.M)
_REFUSED = re.compile(r'^pdmesh:request_refusal_seconds_bucket\{.*le="([^"]+)".*\} (\S+)$', re.M)
_STATUS = re.compile(rb"HTTP/1\.1 (\d+)")

#: How many refusals took at most so many seconds, by the histogram's bounds.
Refusals = Counter[float]


@dataclass(slots=True)
class Client:
    """Sends requests over bare sockets: on two cores, a client library would be most of the load."""

    mesh: RunningMesh
    target_s: float | None
    rng: random.Random
    answers: Counter[str] = field(default_factory=Counter[str])
    _requests: list[bytes] = field(init=False)  # made before they are sent, which would take the cores that compute

    def __post_init__(self) -> None:
        self._requests = [self._request() for _ in range(NUM_REQUESTS)]

    def _request(self) -> bytes:
        num_tokens = self.rng.randint(*PROMPT_TOKENS)
        body = {
            "model": self.mesh.model,
            "prompt": [self.rng.randrange(10, LLAMA_82M.vocab_size) for _ in range(num_tokens)],
            "max_tokens": OUTPUT_TOKENS,
            "ignore_eos": True,
        }
        content = json.dumps(body).encode()
        target = "" if self.target_s is None else f"x-slo-ttft-ms: {1e3 * self.target_s:g}\r\n"
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self.mesh.record.http_address}\r\nConnection: close\r\n"
            f"{target}Content-Length: {len(content)}\r\n\r\n"
        )
        return head.encode() + content

    async def ask(self) -> None:
        """One request; its answer is counted."""
        host, _, port = self.mesh.record.http_address.partition(":")
        answer = b""
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(ANSWER_LIMIT_S):
                reader, writer = await asyncio.open_connection(host, int(port))
                try:
                    writer.write(self.rng.choice(self._requests))
                    answer = await reader.read()
                finally:
                    writer.close()
        found = _STATUS.match(answer)
        status = found[1].decode() if found is not None else "none"
        if status == "429" and b"\r\nretry-after:" not in answer.lower():
            status = "429 without Retry-After"
        self.answers[status] += 1

    async def closed_loop(self) -> float:
        """Requests a second that a few clients reach."""
        end_s = time.monotonic() + CLOSED_LOOP_S

        async def loop() -> None:
            while time.monotonic() < end_s:
                await self.ask()

        await asyncio.gather(*(loop() for _ in range(CLOSED_LOOP_CLIENTS)))
        return self.answers.total() / CLOSED_LOOP_S

    async def arrive(self, per_s: float, over: asyncio.Event) -> None:
        """A Poisson stream until ``over``; returns when all are answered."""
        async with asyncio.TaskGroup() as tasks:
            next_s = time.monotonic()
            while not over.is_set():
                tasks.create_task(self.ask())
                next_s += self.rng.expovariate(per_s)
                await asyncio.sleep(next_s - time.monotonic())


@dataclass(frozen=True, slots=True)
class Window:
    """What was seen at one rate."""

    per_s: float
    goodput_per_s: float
    refusals: Refusals
    answers: Counter[str]

    def __str__(self) -> str:
        refused = f"{1e3 * refusal_s(self.refusals, 0.99):6.1f}" if self.refusals[math.inf] else "     -"
        return f"{self.per_s:8.1f} {self.goodput_per_s:10.2f} {refused:>12}   {dict(sorted(self.answers.items()))}"


def counted(mesh: RunningMesh) -> tuple[float, Refusals]:
    """What the gateway counted so far: requests within their target, and refusals."""
    metrics = mesh.metrics()["gateway"]
    found = _MET.search(metrics)
    refusals = Refusals({float(bound): int(float(count)) for bound, count in _REFUSED.findall(metrics)})
    return float(found[1]) if found is not None else 0.0, refusals


def refusal_s(refusals: Refusals, share: float) -> float:
    """The ``share`` quantile of the seconds that refusals took, of which there must be some."""
    wanted = share * refusals[math.inf]
    low_s = num_below = 0.0
    for bound_s, count in sorted(refusals.items()):
        if count >= wanted and count > num_below:
            part = (wanted - num_below) / (count - num_below)
            return low_s if bound_s == math.inf else low_s + (bound_s - low_s) * part
        low_s, num_below = bound_s, count
    raise AssertionError("the last bucket holds all")


async def window(mesh: RunningMesh, per_s: float, seconds: float, target_s: float, seed: int) -> Window:
    client, over = Client(mesh, target_s, random.Random(seed)), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(client.arrive(per_s, over))
        await asyncio.sleep(SETTLE_S)
        (met_before, refusals_before), began_s = await asyncio.to_thread(counted, mesh), time.monotonic()
        await asyncio.sleep(seconds)
        (met, refusals), took_s = await asyncio.to_thread(counted, mesh), time.monotonic() - began_s
        over.set()
    refusals.subtract(refusals_before)
    seen = Window(per_s, (met - met_before) / took_s, refusals, client.answers)
    print(seen, flush=True)
    await asyncio.to_thread(mesh.wait_until_idle, 60)
    return seen


async def measure(mesh: RunningMesh, options: argparse.Namespace) -> tuple[list[Window], list[Window]]:
    """Windows at the peak's rate, and at five times it."""
    closed_per_s = await Client(mesh, None, random.Random(0)).closed_loop()
    print(f"closed loop of {CLOSED_LOOP_CLIENTS}: {closed_per_s:.1f} a second")
    print(f"{'a second':>8} {'in target':>10} {'refusals p99':>12}   answers")
    tried = [
        await window(mesh, share * closed_per_s, options.seconds, options.target_s, seed)
        for seed, share in enumerate(SHARES)
    ]
    most_per_s = max(seen.goodput_per_s for seen in tried)
    peak_per_s = min(seen.per_s for seen in tried if seen.goodput_per_s >= PEAK_SHARE * most_per_s)
    peaks: list[Window] = []
    floods: list[Window] = []
    for turn in range(options.rounds):
        peaks.append(await window(mesh, peak_per_s, options.seconds, options.target_s, 100 + turn))
        floods.append(await window(mesh, OVERLOAD * peak_per_s, options.seconds, options.target_s, 200 + turn))
    return peaks, floods


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each window")
    parser.add_argument("--rounds", type=int, default=2, help="turns of peak and overload")
    parser.add_argument("--target-s", type=float, default=2.0, help="to the first token")
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1)
    parser.add_argument("--no-timings", action="store_true", help="on a busy machine: refusals are printed, not judged")
    parser.add_argument("--keep", type=Path, help="keep the mesh's folder, with its logs, here")
    options = parser.parse_args()
    print(heading(f"Overload, {options.prefill}P+{options.decode}D, first token within {options.target_s:g} s"))
    with TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        model = write_checkpoint(folder / "model", shape=LLAMA_82M, dtype="bfloat16")
        with running_mesh(folder, model=model, prefill=options.prefill, decode=options.decode) as mesh:
            peaks, floods = asyncio.run(measure(mesh, options))
    limits = Limits()
    peak, flood = (fmean(seen.goodput_per_s for seen in windows) for windows in (peaks, floods))
    print(
        f"goodput at {OVERLOAD:g} x the load: {flood:.2f} of {peak:.2f} a second, "
        f"{limits.at_least('goodput', flood / peak, LEAST_SHARE)} of {LEAST_SHARE:g}"
    )
    refusals = sum((seen.refusals for seen in floods), Refusals())
    p50_s, p99_s = refusal_s(refusals, 0.5), refusal_s(refusals, 0.99)
    judged = "not judged" if options.no_timings else limits.at_most("refusals", p99_s, MAX_REFUSAL_S)
    print(f"{refusals[math.inf]} refusals: p50 {1e3 * p50_s:.1f} ms, p99 {1e3 * p99_s:.1f} ms, {judged}")
    answers = sum((seen.answers for seen in (*peaks, *floods)), Counter[str]())
    num_wrong = sum(count for status, count in answers.items() if status not in ("200", "429"))
    print(f"answers that are neither 200 nor 429 with Retry-After: {num_wrong}")
    limits.at_most("answers", num_wrong, 0.5)
    limits.end()


if __name__ == "__main__":
    main()
