"""Five times the load that a mesh can take: is as much served within its target, and how long do refusals take?

    python benchmarks/overload.py [--seconds 15] [--rounds 2] [--target-s 2] [--prefill 1] [--decode 1] [--no-timings]

Real processes with the 82M checkpoint of the other benchmarks. Requests have prompts of 32 to 96 tokens and a target
for their first token, and come as a Poisson stream, each on a connection of its own. First a closed loop tells what the
mesh can do; then the rate near that is searched at which most requests a second come within their targets (*goodput*);
then that rate and five times it take turns. Goodput is the gateway's own count (`pdmesh:request_slo`), over each window
after a few seconds at its rate. A refusal's time is the gateway's, from the request's head to its answer, of its log.

Exit code 1 if goodput at five times the load is below 0.95 of the peak's, if the 99th percentile of refusals is above
20 ms (not judged with ``--no-timings``), or if any answer is neither 200 nor 429 with Retry-After.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from report import Limits, heading, quantile

from pdmesh.testing.checkpoints import LLAMA_82M, write_checkpoint
from pdmesh.testing.mesh import RunningMesh, running_mesh

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

#: No answer takes longer: it is lost.
ANSWER_LIMIT_S = 60.0

_MET = re.compile(r'^pdmesh:request_slo_total\{.*met="true".*\} (\S+)$', re.M)
_STATUS = re.compile(rb"HTTP/1\.1 (\d+)")


@dataclass(slots=True)
class Client:
    """Sends requests over bare sockets: on two cores, a client library would be most of the load."""

    mesh: RunningMesh
    target_s: float | None
    rng: random.Random
    answers: Counter[str] = field(default_factory=Counter[str])

    def request(self) -> bytes:
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
                    writer.write(self.request())
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
    refusals_s: Sequence[float]
    answers: Counter[str]

    def __str__(self) -> str:
        refused = f"{1e3 * quantile(self.refusals_s, 0.99):6.1f}" if len(self.refusals_s) > 1 else "     -"
        return f"{self.per_s:8.1f} {self.goodput_per_s:10.2f} {refused:>12}   {dict(sorted(self.answers.items()))}"


def num_met(mesh: RunningMesh) -> float:
    found = _MET.search(mesh.metrics()["gateway"])
    return float(found[1]) if found is not None else 0.0


def refusals_of(log: bytes) -> list[float]:
    """Seconds that each refusal took at the gateway."""
    entries = [json.loads(line) for line in log.splitlines() if b'"request ended"' in line]
    return [entry["duration_s"] for entry in entries if "overloaded" in entry["finish_reasons"]]


async def window(mesh: RunningMesh, per_s: float, seconds: float, target_s: float, seed: int) -> Window:
    client, over = Client(mesh, target_s, random.Random(seed)), asyncio.Event()
    log_file = mesh.folder / "gateway.log"
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(client.arrive(per_s, over))
        await asyncio.sleep(SETTLE_S)
        before, began_s, offset = await asyncio.to_thread(num_met, mesh), time.monotonic(), log_file.stat().st_size
        await asyncio.sleep(seconds)
        met = await asyncio.to_thread(num_met, mesh) - before
        took_s, end = time.monotonic() - began_s, log_file.stat().st_size
        over.set()
    with log_file.open("rb") as log:
        log.seek(offset)
        refusals_s = refusals_of(log.read(end - offset).rpartition(b"\n")[0])
    seen = Window(per_s, met / took_s, refusals_s, client.answers)
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
    refusals_s = [refusal_s for seen in floods for refusal_s in seen.refusals_s]
    p50_s, p99_s = quantile(refusals_s, 0.5), quantile(refusals_s, 0.99)
    judged = "not judged" if options.no_timings else limits.at_most("refusals", p99_s, MAX_REFUSAL_S)
    print(f"{len(refusals_s)} refusals: p50 {1e3 * p50_s:.1f} ms, p99 {1e3 * p99_s:.1f} ms, {judged}")
    answers = sum((seen.answers for seen in (*peaks, *floods)), Counter[str]())
    num_wrong = sum(count for status, count in answers.items() if status not in ("200", "429"))
    print(f"answers that are neither 200 nor 429 with Retry-After: {num_wrong}")
    limits.at_most("answers", num_wrong, 0.5)
    limits.end()


if __name__ == "__main__":
    main()
