"""Our mesh and vLLM in turn, on the same checkpoint and load, through the same unmodified client `vllm bench serve`.

    python benchmarks/peer.py --vllm VENV [--systems vllm mixed 1p1d] [--rounds 3]

VENV is a virtual environment that has vLLM (PEER_VENV names it too); without one there is neither peer nor
client and nothing is measured. Every system starts, answers a load of each kind to warm up, is measured, and stops
before the next one starts. Figures are medians over rounds; prompts are the same for all systems and new in each
round, so that no prefix cache helps. Loads are greedy, and *sampled* (temperature 0.7, top_p 0.95, top_k 40) where a
row says so.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

import httpx
from report import GREEDY, SAMPLED, heading, unavailable

from pdmesh.cli.processes import ending_with_us
from pdmesh_testing.checkpoints import LLAMA_82M, write_checkpoint
from pdmesh_testing.mesh import running_mesh

OWN_ENVIRONMENT = ("PYTHONPATH", "OMP_NUM_THREADS", "MKL_NUM_THREADS")

START_TIMEOUT_S = 300.0
CLIENT_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class Load:
    num_requests: int
    at_once: int
    num_prompt_tokens: int
    num_output_tokens: int
    is_sampled: bool = False

    def __str__(self) -> str:
        if self.num_requests == 1:
            return f"one prompt of {self.num_prompt_tokens}"
        return (
            f"{self.num_requests} requests, {self.at_once} at once,"
            f" {self.num_prompt_tokens} in / {self.num_output_tokens} out, {'sampled' if self.is_sampled else 'greedy'}"
        )


BURST, SAMPLED_BURST = Load(64, 32, 256, 64), Load(64, 32, 256, 64, is_sampled=True)
LONG, MEDIUM = Load(1, 1, 16384, 1), Load(1, 1, 4096, 1)


@dataclass(frozen=True, slots=True)
class Figures:
    """What the client reports; its own names are those of the JSON file it writes."""

    total_token_throughput: float  # prompt and output tokens, per second
    median_itl_ms: float
    p99_itl_ms: float
    median_ttft_ms: float


def median(rounds: Sequence[Figures]) -> Figures:
    return Figures(
        *(statistics.median(getattr(figures, field.name) for figures in rounds) for field in fields(Figures))
    )


@dataclass(frozen=True, slots=True)
class Client:
    vllm: Path  # the program
    checkpoint: Path
    through: Sequence[str]  # put before the client's command

    def measure(self, base_url: str, load: Load, seed: int) -> Figures:
        """Run the load once. RuntimeError if a request failed."""
        with tempfile.TemporaryDirectory() as folder:
            options = {
                "backend": "openai",
                "base-url": base_url,
                "model": self.checkpoint,
                "dataset-name": "random",
                "num-prompts": load.num_requests,
                "max-concurrency": load.at_once,
                "random-input-len": load.num_prompt_tokens,
                "random-output-len": load.num_output_tokens,
                "seed": seed,
                "metric-percentiles": 99,
                "result-dir": folder,
                "result-filename": "result.json",
                **{name.replace("_", "-"): value for name, value in (SAMPLED if load.is_sampled else GREEDY).items()},
            }
            arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
            flags = ["--ignore-eos", "--save-result", "--disable-tqdm"]
            run([*self.through, str(self.vllm), "bench", "serve", *arguments, *flags])
            result = json.loads(Path(folder, "result.json").read_text())
        if result["failed"]:
            raise RuntimeError(f"{result['failed']} of {load.num_requests} requests failed")
        return Figures(*(result[field.name] for field in fields(Figures)))


def run(command: Sequence[str]) -> None:
    done = subprocess.run(
        command, env=foreign_environment(), capture_output=True, text=True, timeout=CLIENT_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} exited with {done.returncode}:\n{done.stderr[-4000:]}")


def foreign_environment() -> dict[str, str]:
    """Ours, less what leads to our own packages, and says how many threads our own processes have."""
    return {key: value for key, value in os.environ.items() if key not in OWN_ENVIRONMENT}


@contextmanager
def running_vllm(vllm: Path, checkpoint: Path) -> Generator[str]:
    """Its base URL, once it serves; it chooses its threads itself."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    base_url = f"http://127.0.0.1:{port}"
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"]
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(
            ending_with_us([str(vllm), "serve", str(checkpoint), *arguments]),
            env={"VLLM_CPU_KVCACHE_SPACE": "2", **foreign_environment()},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            wait_until_healthy(server, base_url)
            yield base_url
        except TimeoutError as error:
            log.seek(0)
            raise RuntimeError(f"vLLM does not serve:\n{log.read()[-4000:].decode(errors='replace')}") from error
        finally:
            server.terminate()
            server.wait(60)


def wait_until_healthy(server: subprocess.Popen[bytes], base_url: str) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while server.poll() is None and time.monotonic() < deadline_s:
        try:
            if httpx.get(f"{base_url}/health").is_success:
                return
        except httpx.TransportError:
            pass  # it does not listen yet
        time.sleep(0.5)
    raise TimeoutError


@contextmanager
def running_pdmesh(checkpoint: Path, *, prefill: int, decode: int, mixed: int) -> Generator[str]:
    with (
        tempfile.TemporaryDirectory() as folder,
        running_mesh(Path(folder), model=checkpoint, prefill=prefill, decode=decode, mixed=mixed) as mesh,
    ):
        yield mesh.base_url


def measure(
    client: Client, start: Callable[[], AbstractContextManager[str]], loads: Sequence[Load], rounds: int
) -> dict[Load, Figures]:
    """Each load once to warm up and ``rounds`` times for the figures; progress goes to stderr."""
    with start() as base_url:
        for load in loads:
            client.measure(base_url, load, seed=0)
        results: dict[Load, Figures] = {}
        for load in loads:
            taken = [client.measure(base_url, load, seed=1 + number) for number in range(rounds)]
            print(f"  {load}: {taken}", file=sys.stderr, flush=True)
            results[load] = median(taken)
        return results


def row(name: str, load: Load, figures: Figures, against: Figures | None) -> str:
    """A line of the table; ratios to ``against`` in brackets."""

    def cell(field: str, shape: str) -> str:
        value = getattr(figures, field)
        ratio = f" ({value / getattr(against, field):.2f} x)" if against is not None and against is not figures else ""
        return f"{value:{shape}}{ratio}"

    if load.num_requests == 1:
        return f"| {load} | {name} | | | | {cell('median_ttft_ms', '.0f')} |"
    return (
        f"| {load} | {name} | {cell('total_token_throughput', '.0f')} | {cell('median_itl_ms', '.1f')}"
        f" | {cell('p99_itl_ms', '.1f')} | {cell('median_ttft_ms', '.0f')} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, default=os.environ.get("PEER_VENV"), help="environment that has vLLM")
    parser.add_argument("--systems", nargs="+", choices=["vllm", "mixed", "1p1d"], default=["vllm", "mixed", "1p1d"])
    choices = {"burst": BURST, "sampled": SAMPLED_BURST, "4k": MEDIUM, "16k": LONG}
    parser.add_argument("--loads", nargs="+", choices=[*choices], default=[*choices])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--through", default="", help="command that runs the client's, for instance one that takes a lock"
    )
    options = parser.parse_args()
    print(heading("peer: pdmesh and vLLM, Llama 82M bf16, the client is vllm bench serve"))
    program = None if options.vllm is None else Path(options.vllm, "bin", "vllm")
    if program is None or not program.exists():
        unavailable("no vLLM is here; give its environment with --vllm or PEER_VENV")
    loads = [choices[name] for name in options.loads]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_checkpoint(Path(folder, "model"), shape=LLAMA_82M, dtype="bfloat16", initializer_gain=1.0)
        client = Client(program, checkpoint, shlex.split(options.through))
        systems: dict[str, tuple[str, Callable[[], AbstractContextManager[str]]]] = {
            "vllm": ("vLLM", lambda: running_vllm(program, checkpoint)),
            "mixed": ("pdmesh, 1 mixed", lambda: running_pdmesh(checkpoint, prefill=0, decode=0, mixed=1)),
            "1p1d": ("pdmesh, 1P+1D", lambda: running_pdmesh(checkpoint, prefill=1, decode=1, mixed=0)),
        }
        names = {key: name for key, (name, _) in systems.items()}
        figures = {key: measure(client, systems[key][1], loads, options.rounds) for key in options.systems}
    print("| load | system | tokens/s | ITL p50, ms | ITL p99, ms | TTFT p50, ms |\n|---|---|---|---|---|---|")
    for load in loads:
        for key in options.systems:
            print(row(names[key], load, figures[key][load], figures[options.systems[0]][load]))
    for load in (BURST, SAMPLED_BURST):
        if not ({"mixed", "1p1d"} <= figures.keys() and load in loads):
            continue
        split, mixed = figures["1p1d"][load], figures["mixed"][load]
        rate = split.total_token_throughput / mixed.total_token_throughput
        print(
            f"\n1P+1D against mixed, {load}: {rate:.2f} x tokens/s, ITL p99 {split.p99_itl_ms / mixed.p99_itl_ms:.2f} x"
        )


if __name__ == "__main__":
    main()
