"""One long prompt through several stages: in the simulator with given times, and through two stages of the real engine.

Simulated: the time to the first token of a prompt of 16K tokens through 1, 2, 4 and 8 stages.
Real: one prompt through two stages, each one process on one core, against two processes of one stage side by side,
which compute a prompt each: two prompts in that time are what the machine can do, and the ceiling for one through both.
Rounds alternate, A B B A; processes that do not compute wait.

    python benchmarks/stages.py [--tokens 4096] [--chunk 256] [--rounds 2]
"""

from __future__ import annotations

import argparse
import array
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import mean

from report import Limits, heading

from pdmesh.config import InstanceDegrees, MeshConfig, WorkerConfig
from pdmesh.engine.base import Engine, EngineSequence, SequenceSlice, StepFlight
from pdmesh.model import KvLayout, RequestId, SamplingParams, num_blocks_for
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import LinearLatencyModel
from pdmesh.worker.engines import build_engine
from pdmesh.worker.rank_start import start_ranks
from pdmesh_lab.sim.mesh import MeshShape, study_core
from pdmesh_lab.sim.simulator import Simulator
from pdmesh_lab.sim.workload import Arrival
from pdmesh_testing.checkpoints import LLAMA_82M, write_checkpoint

#: A millisecond for each token, two for a step, and attention that doubles the time of the last tokens.
GIVEN = LinearLatencyModel(a_s=2e-3, b_s=1e-3, c_s=6e-8, d_s=3e-8, decode_a_s=4e-3, decode_s=1e-3)
LEAST = {2: 1.85, 4: 3.6, 8: 7.0}
LEAST_OF_CEILING = 0.92


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--alone", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.alone is not None:
        _compute_when_told(arguments.alone, arguments.tokens, arguments.chunk)
        return
    limits = Limits()
    print(heading("One prompt through several stages"))
    one_s = simulated_ttft_s(1)
    for num_stages, least in LEAST.items():
        ratio = one_s / simulated_ttft_s(num_stages)
        what = f"simulated, {num_stages} stages"
        print(f"{what}: {ratio:.2f} x, {limits.at_least(what, ratio, least)}", flush=True)
    ratio = real_share_of_ceiling(arguments.tokens, arguments.chunk, arguments.rounds)
    what = "real engine, 2 stages"
    print(f"{what}: {ratio:.1%} of the ceiling, {limits.at_least(what, ratio, LEAST_OF_CEILING)}")
    limits.end()


def simulated_ttft_s(num_stages: int) -> float:
    """Return the time to the first token of 16K tokens."""
    mesh = MeshShape(
        num_prefill=1,
        num_decode=1,
        num_mixed=0,
        kv_layout=KvLayout(num_layers=16, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32"),
        num_kv_tokens=32_768,
        prefill_stages=num_stages,
    )
    arrivals = [Arrival(arrival_s=0.0, num_prompt_tokens=16_384, num_output_tokens=2)]
    core = study_core("pdmesh", PolicyConfig(latency=GIVEN), 0)
    result = Simulator(core, mesh.instances(GIVEN), arrivals).run()
    return result.requests[0].token_times_s[0]


def real_share_of_ceiling(num_tokens: int, chunk_tokens: int, num_rounds: int) -> float:
    """Return what part of the two side by side the two stages reach."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        checkpoint = write_checkpoint(Path(name), shape=LLAMA_82M, dtype="bfloat16", seed=1)
        sizes = [f"--tokens={num_tokens}", f"--chunk={chunk_tokens}"]
        command = [sys.executable, __file__, f"--alone={checkpoint}", *sizes]
        alone = [stack.enter_context(_Alone(command)) for _ in range(2)]
        config = _config(checkpoint, num_tokens)
        ranks = stack.enter_context(start_ranks(config, InstanceDegrees(1, 2), 1))
        engine = build_engine(config, 1, ranks, num_stages=2)
        staged_s: list[float] = []
        beside_s: list[float] = []
        prompt_s(engine, num_tokens, chunk_tokens)  # first use of code and memory
        _both(alone)
        for number in range(2 * num_rounds):
            for is_staged in (True, False) if number % 2 == 0 else (False, True):
                if is_staged:
                    staged_s.append(prompt_s(engine, num_tokens, chunk_tokens))
                else:
                    beside_s.append(_both(alone))
            load = f"load {os.getloadavg()[0]:.1f}"
            print(f"  {staged_s[-1]:.2f} s through 2 stages, {beside_s[-1]:.2f} s two side by side; {load}", flush=True)
    return mean(beside_s) / 2 / mean(staged_s)


def prompt_s(engine: Engine, num_tokens: int, chunk_tokens: int) -> float:
    """Return how long a prompt takes, each chunk of which enters as the last one has begun."""
    sequence = EngineSequence(
        request_id=RequestId("r"),
        params=SamplingParams(max_tokens=8),
        token_ids=array.array("i", [7 + number % 1000 for number in range(num_tokens)]),
        num_prompt_tokens=num_tokens,
        block_table=list(range(num_blocks_for(num_tokens, engine.kv.layout.block_size))),
    )
    threads: list[threading.Thread] = []
    began_s = time.perf_counter()
    for start in range(0, num_tokens, chunk_tokens):
        size = min(chunk_tokens, num_tokens - start)
        part = SequenceSlice(sequence=sequence, start=start, num_tokens=size, sample=start + size == num_tokens)
        if engine.num_stages == 1:
            engine.execute([part])
            continue
        begun = threading.Event()
        flight = StepFlight(on_begin=begun.set)
        threads.append(threading.Thread(target=engine.execute, args=([part],), kwargs={"flight": flight}))
        threads[-1].start()
        begun.wait()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began_s


def _config(checkpoint: Path, num_tokens: int) -> MeshConfig:
    num_bytes = (num_tokens + 1024) * 2 * 2 * LLAMA_82M.num_layers * LLAMA_82M.num_kv_heads * LLAMA_82M.head_dim
    return MeshConfig(model=str(checkpoint), worker=WorkerConfig(device="cpu", kv_cache_bytes=num_bytes))


class _Alone:
    """A process of one stage that computes a prompt when it is told to."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> _Alone:
        assert self._read() == "ready"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def begin(self) -> None:
        assert self._process.stdin is not None
        print("go", file=self._process.stdin, flush=True)

    def end(self) -> None:
        assert self._read() == "done"

    def _read(self) -> str:
        assert self._process.stdout is not None
        while (line := self._process.stdout.readline().strip()) not in ("ready", "done", ""):
            pass
        return line


def _both(alone: list[_Alone]) -> float:
    began_s = time.perf_counter()
    for each in alone:
        each.begin()
    for each in alone:
        each.end()
    return time.perf_counter() - began_s


def _compute_when_told(checkpoint: Path, num_tokens: int, chunk_tokens: int) -> None:
    engine = build_engine(_config(checkpoint, num_tokens), 1)
    print("ready", flush=True)
    for _ in sys.stdin:
        prompt_s(engine, num_tokens, chunk_tokens)
        print("done", flush=True)


if __name__ == "__main__":
    main()
