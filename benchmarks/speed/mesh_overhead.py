"""What the mesh itself adds to the time to first token, and how much of a KV transfer is not hidden behind compute.

A 1P+1D mesh of ``LLAMA_82M`` (`pdmesh_testing.checkpoints`) or of ``--model``, idle but for one request at a time.

* Overhead: time to first token of a 16-token prompt, seen by a streaming HTTP client, less the duration of the step
  that computed it (from the request's own record).
* Exposed KV time over prefill time, for longer prompts: seconds between the last layer's computation and the
  receiver's acknowledgement, over the sum of the chunks' durations.

    python -m benchmarks.speed.mesh_overhead [--requests 100] [--tokens 1000 2000 4000 8000] [--repeats 5]
        [--hosts | --ranks 4 1] [--model MODEL]

With ``--ranks`` the two instances have so many ranks, each a part of the heads; KV goes from the ones to the others.
With ``--hosts`` the two instances are on two hosts (`pdmesh_testing.hosts`; it takes root), and KV goes over UCX.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import httpx
import msgspec

from benchmarks.harness.report import Limits, heading, quantile
from pdmesh.wire.messages import RecordEntry, RequestRecord
from pdmesh_testing.checkpoints import LLAMA_82M, write_checkpoint
from pdmesh_testing.hosts import API_KEY, GATEWAY_PORT, SCHEDULER_NAME, SCHEDULER_PORT, Hosts, running_hosts
from pdmesh_testing.mesh import running_mesh

TARGET_OVERHEAD_MS = 10
TARGET_EXPOSED_SHARE = 0.05
TARGET_EXPOSED_SHARE_OF_RANKS = 0.01
TARGET_EXPOSED_SHARE_BETWEEN_HOSTS = 0.005


class Mesh(Protocol):
    """The mesh that is asked."""

    @property
    def model(self) -> str: ...

    def request_record(self, request_id: str) -> RequestRecord: ...


class HostMesh(NamedTuple):
    """One whose scheduler is on host a."""

    hosts: Hosts
    model: str

    def request_record(self, request_id: str) -> RequestRecord:
        host = self.hosts["a"]
        command = [sys.executable, "-m", "pdmesh.cli", "requests", "show", request_id, "-o", "json"]
        settings = [f"PDMESH_{name}={value}" for name, value in host.settings.items()]
        said = host.run(["env", *settings, *command, "--scheduler", f"{SCHEDULER_NAME}:{SCHEDULER_PORT}"])
        return msgspec.json.decode(said, type=RequestRecord)


@contextmanager
def here(folder: Path, checkpoint: Path, ranks: Sequence[int]) -> Generator[tuple[Mesh, httpx.Client]]:
    """Run all on this machine; ``ranks`` are those of the prefill and of the decode instance."""
    prefill, decode = ranks
    settings = {"PREFILL_TENSOR_PARALLEL_SIZE": str(prefill), "DECODE_TENSOR_PARALLEL_SIZE": str(decode)}
    with (
        running_mesh(folder, model=checkpoint, settings=settings) as mesh,
        httpx.Client(base_url=mesh.base_url, timeout=600) as client,
    ):
        yield mesh, client


@contextmanager
def on_hosts(folder: Path, checkpoint: Path) -> Generator[tuple[Mesh, httpx.Client]]:
    """Run the scheduler, the gateway and the client on a; a prefill instance on b; a decode instance on c."""
    with running_hosts(folder / "hosts", ("a", "b", "c"), {"MODEL": str(checkpoint)}) as hosts:
        for host, kind in (("a", "scheduler"), ("b", "prefill"), ("c", "decode"), ("a", "gateway")):
            hosts[host].start(kind, kind)
        with (
            hosts["a"].entered(),
            httpx.Client(
                base_url=f"https://{hosts['a'].address}:{GATEWAY_PORT}",
                headers={"Authorization": f"Bearer {API_KEY}"},
                verify=hosts.https(),
                timeout=600,
                trust_env=False,
            ) as client,
        ):
            while client.get("/ready").status_code != 200:
                time.sleep(0.1)
            yield HostMesh(hosts, checkpoint.name), client


def ask(client: httpx.Client, mesh: Mesh, prompt: list[int], request_id: str) -> float:
    """Stream four tokens; the time to the first, in seconds."""
    body = {"model": mesh.model, "prompt": prompt, "max_tokens": 4, "ignore_eos": True, "stream": True}
    began_s = time.perf_counter()
    first_s = 0.0
    with client.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": request_id}) as response:
        for line in response.iter_lines():
            if line.startswith("data: ") and not first_s and line != "data: [DONE]" and json.loads(line[6:])["choices"]:
                first_s = time.perf_counter() - began_s
    return first_s


def computed_s(record: RequestRecord) -> float:
    """Device time of the request's chunks."""
    return sum(entry.figures["step_s"] for entry in record.entries if entry.what == "chunk")


def sent_record(mesh: Mesh, request_id: str) -> tuple[RequestRecord, RecordEntry]:
    """Return the record of a request and its entry of the sent KV, which can come after the last token.

    Raises SystemExit if the KV was not sent within 10 s.
    """
    deadline_s = time.monotonic() + 10
    while True:
        record = mesh.request_record(request_id)
        for entry in record.entries:
            if entry.what == "sent":
                return record, entry
        if time.monotonic() > deadline_s:
            raise SystemExit(f"{request_id} sent no KV: {', '.join(entry.what for entry in record.entries)}")
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 2000, 4000, 8000])
    parser.add_argument("--repeats", type=int, default=5)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--hosts", action="store_true", help="the two instances are on two hosts")
    where.add_argument("--ranks", type=int, nargs=2, default=[1, 1], help="of the prefill and of the decode instance")
    parser.add_argument("--model", type=Path, help="folder or GGUF file with 8,192 tokens or more")
    arguments, limits, rng = parser.parse_args(), Limits(), random.Random(0)

    def prompt(num_tokens: int) -> list[int]:
        return [rng.randrange(LLAMA_82M.vocab_size) for _ in range(num_tokens)]

    subject = arguments.model or "Llama 82M bf16"
    print(heading("Cost of disaggregation, {}, 1P+1D, {} and {} ranks".format(subject, *arguments.ranks)))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint = arguments.model or write_checkpoint(folder / "model", shape=LLAMA_82M, dtype="bfloat16")
        running = on_hosts(folder, checkpoint) if arguments.hosts else here(folder, checkpoint, arguments.ranks)
        with running as (mesh, client):
            for i in range(5):
                ask(client, mesh, prompt(16), f"warm-{i}")
            overheads_ms: list[float] = []
            for i in range(arguments.requests):
                ttft_s = ask(client, mesh, prompt(16), f"short-{i}")
                overheads_ms.append((ttft_s - computed_s(mesh.request_record(f"short-{i}"))) * 1e3)
            p50, p99 = quantile(overheads_ms, 0.5), quantile(overheads_ms, 0.99)
            print(f"TTFT beyond the model's step, 16-token prompt, {len(overheads_ms)} requests:")
            print(
                f"  p50 {p50:.2f} ms, p99 {p99:.2f} ms "
                f"({limits.at_most('overhead p50', p50, TARGET_OVERHEAD_MS)} of {TARGET_OVERHEAD_MS} ms)"
            )
            print(f"KV transfer, not hidden behind compute (median of {arguments.repeats}):")
            target = TARGET_EXPOSED_SHARE
            if arguments.hosts:
                target = TARGET_EXPOSED_SHARE_BETWEEN_HOSTS
            elif max(arguments.ranks) > 1:
                target = TARGET_EXPOSED_SHARE_OF_RANKS
            for num_tokens in arguments.tokens:
                shares, sizes = list[float](), list[float]()
                for i in range(arguments.repeats):
                    request_id = f"long-{num_tokens}-{i}"
                    ask(client, mesh, prompt(num_tokens), request_id)
                    record, sent = sent_record(mesh, request_id)
                    shares.append(sent.figures["exposed_s"] / computed_s(record))
                    sizes.append(sent.figures["num_bytes"])
                share = quantile(shares, 0.5)
                stands = limits.at_most(f"exposed share of {num_tokens} tokens", share, target)
                print(
                    f"  {num_tokens:5d} tokens, {sizes[0] / 1e6:6.1f} MB: exposed {share:.2%} of prefill time "
                    f"({stands} of {target:.1%})"
                )
    limits.end()


if __name__ == "__main__":
    main()
