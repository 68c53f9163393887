"""Short requests among very long prompts, on a mesh whose instances share one GPU: `python -m benchmarks.gpu.mesh_gpu`.

Llama-3-8B's shape in bf16 with random weights. One mesh after the other on the same device and load: 1P+1D (two
processes, half of the KV memory each), one mixed instance (all of it: what a server without disaggregation would be),
and 1P+1D under ``fcfs``, the convoy that is there without us. On each, one long prompt alone; short requests of 32 to
256 tokens alone, a Poisson stream; and the same with long prompts among them, evenly spread. The client is that of
`convoy.py`, and so are the rate, the share of long ones, and the limit: the short ones' TTFT p99 over what it is
without long ones. Processes that share a GPU take turns on it: prefill and decode slow each other down.

    python -m benchmarks.gpu.mesh_gpu [--only 1P+1D mixed] [--requests 66] [--long-tokens 65536] [--shape tiny]

Every mesh takes a minute and a half on an H100, 80 GB of which 70 are needed. Without a network: `tests/gpu/recipe.sh`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import statistics
import subprocess
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.harness.report import Limits, heading, unavailable
from benchmarks.policies.convoy import (
    FCFS,
    OUTPUT_TOKENS,
    REQUESTS_PER_S,
    SHORT_TOKENS,
    TTFT_LIMIT,
    Planned,
    Seen,
    ask_then,
)
from pdmesh.metrics import percentile
from pdmesh_testing.checkpoints import LLAMA_3_8B, TINY, CheckpointShape, write_config
from pdmesh_testing.mesh import RunningMesh, running_mesh
from pdmesh_testing.tokenizers import write_tokenizer

EXPOSED_LIMIT = 0.03  # of the prefill's time, of a long prompt's KV
EXPOSED_TOKENS, NUM_EXPOSED, EXPOSED_GAP_S = (2048, 8192, 32_768), 3, 2.5
NUM_WARM = 8
ANSWER_LIMIT_S = 90.0  # after the last request was sent: a mesh that stands still must not take the device's time
LOG_TAIL_CHARACTERS = 1800  # of each service, where a mesh fails

SPLIT, MIXED, CONVOY = "1P+1D", "mixed", "1P+1D fcfs"

#: With a vocabulary that the client's random prompts fit, and GiB of KV in all.
SHAPES: dict[str, tuple[CheckpointShape, float]] = {
    "llama-3-8b": (LLAMA_3_8B, 34),
    "tiny": (replace(TINY, vocab_size=8192), 0.125),
}


@dataclass(frozen=True, slots=True)
class System:
    prefill: int
    decode: int
    mixed: int
    settings: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def num_instances(self) -> int:
        return self.prefill + self.decode + self.mixed


SYSTEMS = {
    SPLIT: System(1, 1, 0),
    MIXED: System(0, 0, 1),
    CONVOY: System(1, 1, 0, {"SCHEDULER_BUNDLE": FCFS}),
}


@dataclass(frozen=True, slots=True)
class Times:
    """Of some requests, as their client saw them."""

    num_finished: int
    num_requests: int
    ttfts_s: tuple[float, ...]
    itls_s: tuple[float, ...]

    @staticmethod
    def of(seen: Sequence[Seen]) -> Times:
        answered = [one.answer for one in seen if one.answer.times_s]
        return Times(
            sum(one.finished for one in seen),
            len(seen),
            tuple(answer.ttft_s for answer in answered),
            tuple(gap_s for answer in answered for gap_s in answer.gaps_s),
        )

    def ttft_s(self, rank: float) -> float:
        return percentile(self.ttfts_s, rank) or 0.0

    def itl_s(self, rank: float) -> float:
        return percentile(self.itls_s, rank) or 0.0

    def __str__(self) -> str:
        return (
            f"{self.num_finished} of {self.num_requests} finished,"
            f" TTFT p50 {self.ttft_s(50) * 1e3:.1f} p99 {self.ttft_s(99) * 1e3:.1f} ms,"
            f" ITL p50 {self.itl_s(50) * 1e3:.1f} p99 {self.itl_s(99) * 1e3:.1f} ms"
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """One system's run. ``exposed``: share of a lone prompt's prefill, by its tokens; nothing where no KV moves."""

    alone: Times
    among: Times
    long_alone: Times
    long_among: Times
    exposed: Mapping[int, float]

    @property
    def has_failures(self) -> bool:
        runs = (self.alone, self.among, self.long_alone, self.long_among)
        return any(one.num_finished != one.num_requests for one in runs)


def make_load(num_requests: int, num_long: int, long_tokens: int, rate: float, seed: int) -> list[Planned]:
    """The short ones are the same whatever ``num_long`` is."""
    rng = random.Random(seed)
    at_s = 0.0
    load: list[Planned] = []
    for _ in range(num_requests - num_long):
        at_s += rng.expovariate(rate)
        load.append(Planned(at_s, rng.randint(*SHORT_TOKENS)))
    long = [Planned(at_s * (number + 0.25) / num_long, long_tokens) for number in range(num_long)]
    return sorted([*load, *long], key=lambda planned: planned.at_s)


async def drive(mesh: RunningMesh, name: str, load: Sequence[Planned]) -> list[Seen]:
    """Send a load, each request as ``name`` and its number, with a prompt that no other has. Raises TimeoutError."""

    def seed(number: int) -> int:
        return zlib.crc32(f"{name}-{number}".encode())

    async with mesh.client() as client:
        began_s = time.perf_counter() + 0.2
        async with asyncio.timeout(load[-1].at_s + ANSWER_LIMIT_S), asyncio.TaskGroup() as tasks:
            asked = [
                tasks.create_task(ask_then(client, mesh.model, f"{name}-{number}", planned, began_s, seed(number)))
                for number, planned in enumerate(load)
            ]
    return [task.result() for task in asked]


def exposed_shares(
    mesh: RunningMesh, lengths: Sequence[int], repeats: int = NUM_EXPOSED, gap_s: float = EXPOSED_GAP_S
) -> dict[int, float]:
    """KV time that the prefill did not hide, over the prefill's own (as `mesh_overhead.py`): medians."""
    found: dict[int, float] = {}
    for num_tokens in lengths:
        name = f"exposed-{num_tokens}"
        asyncio.run(drive(mesh, name, [Planned(number * gap_s, num_tokens) for number in range(repeats)]))
        shares: list[float] = []
        for number in range(repeats):
            record = mesh.request_record(f"{name}-{number}")
            computed_s = sum(entry.figures["step_s"] for entry in record.entries if entry.what == "chunk")
            exposed_s = [entry.figures["exposed_s"] for entry in record.entries if entry.what == "sent"]
            shares += [seconds / computed_s for seconds in exposed_s]
            print(f"  KV of {num_tokens} tokens exposed: {exposed_s}, computed in {computed_s:.4f} s")
        if shares:
            found[num_tokens] = statistics.median(shares)
    return found


def warm_up(mesh: RunningMesh, long_tokens: int) -> None:
    """Use everything once: short requests together, and a long one."""
    warm = [Planned(number / 20, SHORT_TOKENS[number % 2]) for number in range(NUM_WARM)]
    asyncio.run(drive(mesh, "warm", [*warm, Planned(1.0, long_tokens)]))


def measure(mesh: RunningMesh, load: Sequence[Planned], long_tokens: int, exposed_tokens: Sequence[int]) -> Measured:
    warm_up(mesh, long_tokens)
    long_alone = asyncio.run(drive(mesh, "lone", [Planned(0.0, long_tokens)]))
    short = asyncio.run(drive(mesh, "short", [planned for planned in load if not planned.is_long]))
    among = asyncio.run(drive(mesh, "among", load))
    answered = (one for one in among if not one.is_long and one.answer.times_s)
    slowest = max(answered, key=lambda one: one.answer.ttft_s)
    print(f"the slowest short one:\n{mesh.pdmesh('requests', 'show', slowest.name)}")
    exposed = exposed_shares(mesh, exposed_tokens)
    mesh.wait_until_idle(60)
    return Measured(
        alone=Times.of(short),
        among=Times.of([one for one in among if not one.is_long]),
        long_alone=Times.of(long_alone),
        long_among=Times.of([one for one in among if one.is_long]),
        exposed=exposed,
    )


def report(name: str, measured: Measured, limits: Limits) -> None:
    print(f"{name}, short alone: {measured.alone}")
    print(f"{name}, short among: {measured.among}")
    print(f"{name}, long alone:  {measured.long_alone}")
    print(f"{name}, long among:  {measured.long_among}")
    ratio = measured.among.ttft_s(99) / measured.alone.ttft_s(99)
    stands = f"{limits.at_most('short TTFT p99', ratio, TTFT_LIMIT)} of {TTFT_LIMIT}" if name == SPLIT else "no limit"
    print(f"{name}: short TTFT p99 among long ones {ratio:.2f} x alone ({stands})")
    for num_tokens, share in measured.exposed.items():
        stands = "no limit"
        if name == SPLIT:
            stands = (
                f"{limits.at_most(f'exposed KV of {num_tokens} tokens', share, EXPOSED_LIMIT)} of {EXPOSED_LIMIT:.0%}"
            )
        print(f"{name}: KV of {num_tokens} tokens alone exposed for {share:.2%} of its prefill ({stands})")


def compare(runs: Mapping[str, Measured]) -> None:
    """Ratios of 1P+1D to the others, of the same run."""
    ours = runs.get(SPLIT)
    for name, theirs in runs.items():
        if ours is None or name == SPLIT:
            continue

        def times(what: str, our: float, their: float) -> str:
            return f"{what} {our / their:.2f}" if their else f"{what} -"

        pairs = [
            times("short TTFT p99 among", ours.among.ttft_s(99), theirs.among.ttft_s(99)),
            times("short TTFT p99 alone", ours.alone.ttft_s(99), theirs.alone.ttft_s(99)),
            times("short ITL p99 among", ours.among.itl_s(99), theirs.among.itl_s(99)),
            times("long TTFT among", ours.long_among.ttft_s(50), theirs.long_among.ttft_s(50)),
            times("long TTFT alone", ours.long_alone.ttft_s(50), theirs.long_alone.ttft_s(50)),
        ]
        print(f"{SPLIT} over {name}: {', '.join(pairs)}")


def device_line() -> str | None:
    """Name, memory used and memory there is, as the driver has it; None without one."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=name,memory.used,memory.total", "--format=csv,noheader"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return asked.stdout.strip() or None


def write_model(folder: Path, shape: CheckpointShape) -> Path:
    """What a mesh with ``load_format = "dummy"`` reads: no weights."""
    write_config(folder, shape=shape, dtype="bfloat16")
    write_tokenizer(folder, vocab_size=shape.vocab_size, model_max_length=shape.max_position_embeddings)
    return folder


def serving(system: System, model: Path, folder: Path, kv_bytes: int) -> AbstractContextManager[RunningMesh]:
    """Run a mesh with random weights, whose instances share so many bytes of KV."""
    settings = {
        "DRAIN_S": "5",
        "WORKER_LOAD_FORMAT": "dummy",
        "WORKER_KV_CACHE_BYTES": str(kv_bytes // system.num_instances),
        **system.settings,
    }
    return running_mesh(
        folder, model=model, settings=settings, prefill=system.prefill, decode=system.decode, mixed=system.mixed
    )


def run(
    system: System,
    model: Path,
    folder: Path,
    kv_bytes: int,
    load: Sequence[Planned],
    long_tokens: int,
    exposed_tokens: Sequence[int],
) -> Measured:
    began_s = time.perf_counter()
    with serving(system, model, folder, kv_bytes) as mesh:
        print(f"serves after {time.perf_counter() - began_s:.0f} s; device: {device_line()}")
        measured = measure(mesh, load, long_tokens, exposed_tokens if system.decode else ())
        print(f"measured after {time.perf_counter() - began_s:.0f} s; device: {device_line()}")
    if measured.has_failures:
        print_logs(folder)
    return measured


def print_logs(folder: Path) -> None:
    for file in sorted(folder.rglob("*.log")):
        print(f"== {file.name}\n{file.read_text(errors='replace')[-LOG_TAIL_CHARACTERS:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS), metavar="SYSTEM")
    parser.add_argument("--requests", type=int, default=66, help="the long ones among them")
    parser.add_argument("--long", type=int, default=2, help="how many are long")
    parser.add_argument("--long-tokens", type=int, default=64 * 1024)
    parser.add_argument(
        "--exposed", type=int, nargs="*", default=EXPOSED_TOKENS, help="whose KV's exposed time is taken"
    )
    parser.add_argument("--rate", type=float, default=REQUESTS_PER_S, help="short requests a second")
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3-8b", help="tiny: for a trial without a GPU")
    parser.add_argument("--kv-gib", type=float, help="of KV in all")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    shape, kv_gib = SHAPES[options.shape]
    device = device_line()
    print(heading(f"Short requests among long prompts, instances on one GPU: {options.shape} bf16, random weights"))
    if device is None and options.shape != "tiny":
        unavailable("there is no CUDA device here")
    shape = replace(shape, max_position_embeddings=options.long_tokens + 1024)
    kv_bytes = int((options.kv_gib or kv_gib) * 2**30)
    load = make_load(options.requests, options.long, options.long_tokens, options.rate, options.seed)
    num_short = options.requests - options.long
    print(
        f"{device}; {num_short} short requests of {SHORT_TOKENS[0]} to {SHORT_TOKENS[1]} tokens, {options.rate:g} a"
        f" second; {options.long} long ones of {options.long_tokens}; {OUTPUT_TOKENS} output tokens each;"
        f" {kv_bytes / 2**30:g} GiB of KV in all; seed {options.seed}"
    )
    limits, runs = Limits(), dict[str, Measured]()
    with tempfile.TemporaryDirectory() as name:
        model = write_model(Path(name, "model"), shape)
        for key in options.only:
            folder = Path(name, key.replace(" ", "-"))
            try:
                runs[key] = run(SYSTEMS[key], model, folder, kv_bytes, load, options.long_tokens, options.exposed)
            except Exception as error:  # the other systems' figures are worth having
                print(f"{key}: failed: {type(error).__name__}: {str(error)[:500]}")
                print_logs(folder)
                continue
            report(key, runs[key], limits)
    compare(runs)
    num_failed = len(options.only) - len(runs) + sum(measured.has_failures for measured in runs.values())
    limits.at_most("systems that failed", num_failed, 0.5)
    limits.end()


if __name__ == "__main__":
    main()
