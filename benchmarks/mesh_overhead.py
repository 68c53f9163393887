"""What the mesh itself adds to the time to first token, and how much of a KV transfer is not hidden behind compute.

A 1P+1D mesh with the 82M-parameter model of ``pdmesh.testing.checkpoints``, idle but for one request at a time.

* Overhead: time to first token of a 16-token prompt, seen by a streaming HTTP client, less the duration of the step
  that computed it (from the request's own record).
* Exposed KV time over prefill time, for longer prompts: seconds between the last layer's computation and the
  receiver's acknowledgement, over the sum of the chunks' durations.

    python benchmarks/mesh_overhead.py [--requests 100]
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

import httpx
from report import Limits, heading, quantile

from pdmesh.testing.checkpoints import LLAMA_82M, write_checkpoint
from pdmesh.testing.mesh import RunningMesh, running_mesh
from pdmesh.wire.messages import RequestRecord

TARGET_OVERHEAD_MS = 10
TARGET_EXPOSED_SHARE = 0.05


def ask(client: httpx.Client, mesh: RunningMesh, prompt: list[int], request_id: str) -> float:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100)
    arguments, limits = parser.parse_args(), Limits()
    rng = random.Random(0)

    def prompt(num_tokens: int) -> list[int]:
        return [rng.randrange(LLAMA_82M.vocab_size) for _ in range(num_tokens)]

    print(heading("Cost of disaggregation, Llama 82M bf16, 1P+1D"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint = write_checkpoint(folder / "model", shape=LLAMA_82M, dtype="bfloat16")
        with (
            running_mesh(folder, model=checkpoint) as mesh,
            httpx.Client(base_url=mesh.base_url, timeout=600) as client,
        ):
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
            print("KV transfer, not hidden behind compute (median of 5):")
            for num_tokens in (1000, 2000, 4000, 8000):
                shares: list[float] = []
                sizes: list[float] = []
                for i in range(5):
                    request_id = f"long-{num_tokens}-{i}"
                    ask(client, mesh, prompt(num_tokens), request_id)
                    record = mesh.request_record(request_id)
                    sent = next(entry for entry in record.entries if entry.what == "sent")
                    shares.append(sent.figures["exposed_s"] / computed_s(record))
                    sizes.append(sent.figures["num_bytes"])
                share = quantile(shares, 0.5)
                stands = limits.at_most(f"exposed share of {num_tokens} tokens", share, TARGET_EXPOSED_SHARE)
                print(
                    f"  {num_tokens:5d} tokens, {sizes[0] / 1e6:6.1f} MB: exposed {share:.2%} of prefill time "
                    f"({stands} of {TARGET_EXPOSED_SHARE:.0%})"
                )
    limits.end()


if __name__ == "__main__":
    main()
