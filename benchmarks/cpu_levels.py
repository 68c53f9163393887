"""The CPU engine at every level against what one core can do: `python benchmarks/cpu_levels.py`.

A model of Qwen2.5-0.5B's shape with random weights, on one thread; figures are tokens a second of that thread's CPU
time, so that other work on the machine matters less, best of several rounds that go through all cases in turn. Shares
are of the rate of multiply-adds that the level's instructions can have, and of the bandwidth of reading memory, both
measured in the same rounds. Decodes are greedy, and *sampled* (temperature 0.7, top_p 0.95, top_k 40) where a row says
so. llama.cpp draws nothing: its steps end with logits.
`--llama-cpp VENV` measures llama.cpp beside it, in turn with it: a venv with `llama-cpp-python` and `gguf`.
`--vllm VENV` measures vLLM: a venv with vLLM for CPU. It needs a C++ compiler.
"""

from __future__ import annotations

import argparse
import array
import ctypes
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import structlog
import torch
from peers import Peer
from report import GREEDY, SAMPLED, Limits, heading, unavailable

from pdmesh.engine.base import EngineSequence, SequenceSlice
from pdmesh.engine.levels import CpuLevel, processor_levels
from pdmesh.engine.runner import TorchEngine
from pdmesh.model import RequestId, SamplingParams, num_blocks_for
from pdmesh_testing.checkpoints import CheckpointShape, write_config

HERE = Path(__file__).parent
SHAPE = CheckpointShape(
    vocab_size=151_936,
    hidden_size=896,
    intermediate_size=4864,
    num_layers=24,
    num_heads=14,
    num_kv_heads=2,
    head_dim=64,
    max_position_embeddings=32_768,
    rope_theta=1e6,
    tie_word_embeddings=True,
)
PREFILLS = (512, 2048)  # tokens, in one step
DECODES = (1, 8, 32)  # requests
#: How a decode draws, by its name in a case.
DRAWS: Mapping[str, Mapping[str, float]] = {"decode": GREEDY, "sampled decode": SAMPLED}
CONTEXT = 256  # of each
BLOCK = 16
LEAST_PREFILL, LEAST_DECODE = 0.7, 0.8  # of multiply-adds; of reading
_LAYERS = (
    SHAPE.num_layers
    * SHAPE.hidden_size
    * (2 * (SHAPE.num_heads + SHAPE.num_kv_heads) * SHAPE.head_dim + 3 * SHAPE.intermediate_size)
)
_HEAD = SHAPE.vocab_size * SHAPE.hidden_size
NUM_WEIGHTS = _LAYERS + _HEAD  # of matrices
_PAIR_FLOPS = 4 * SHAPE.num_layers * SHAPE.num_heads * SHAPE.head_dim


class Best:
    """The least CPU time of each case, by name."""

    def __init__(self) -> None:
        self.times_s: dict[str, float] = {}

    def measure(self, name: str, call: Callable[[], object]) -> None:
        started_s = time.thread_time()
        call()
        self.note(name, time.thread_time() - started_s)

    def note(self, name: str, time_s: float) -> None:
        self.times_s[name] = min(self.times_s.get(name, 1e9), time_s)


#: What the compiler may use for each level's ceilings.
FLAGS = {
    CpuLevel.AVX512_BF16: ("-mavx512f", "-mavx512bf16"),
    CpuLevel.AVX512: ("-mavx512f",),
    CpuLevel.AVX2: ("-mavx2", "-mfma"),
    CpuLevel.BASELINE: (),
    CpuLevel.NEON: (),
}


class Ceilings:
    """The loops of ``native/ceilings.cpp``, compiled for one level."""

    ROUNDS = 2_000_000
    MEMORY = np.ones(1 << 25, dtype=np.float64)  # 256 MiB

    def __init__(self, folder: Path, level: CpuLevel) -> None:
        self.level = level
        library = folder / f"ceilings.{level}.so"
        command = ["c++", "-O3", *FLAGS[level], "-shared", "-fPIC", str(HERE / "native/ceilings.cpp")]
        try:
            subprocess.run([*command, "-o", str(library)], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            unavailable(f"no C++ compiler: {error}")
        self._library = ctypes.CDLL(str(library))
        self._library.multiply_adds.restype = ctypes.c_double
        self._values = np.array([0.999, 0.001], dtype=np.float32)
        self._num_flops = 0.0

    def measure(self, best: Best) -> None:
        best.measure(f"{self.level} multiply", self._multiply)
        best.measure(f"{self.level} read", self._read)

    def flops(self, best: Best) -> float:
        """Operations a second."""
        return self._num_flops / best.times_s[f"{self.level} multiply"]

    def read_bytes(self, best: Best) -> float:
        """Bytes a second."""
        return self.MEMORY.nbytes / best.times_s[f"{self.level} read"]

    def _multiply(self) -> None:
        self._num_flops = self._library.multiply_adds(
            ctypes.c_int64(self.ROUNDS), self._values.ctypes.data_as(ctypes.c_void_p)
        )
        self._values[:] = 0.999, 0.001

    def _read(self) -> None:
        self._library.read_memory(self.MEMORY.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(self.MEMORY.nbytes))


def sequence(number: int, num_tokens: int, first_block: int, draws: Mapping[str, float] = GREEDY) -> EngineSequence:
    return EngineSequence(
        request_id=RequestId(f"bench-{number}"),
        params=SamplingParams(max_tokens=1 << 20, seed=number, **draws),  # type: ignore[arg-type]
        token_ids=array.array("i", [(7919 * (token + number)) % SHAPE.vocab_size for token in range(num_tokens)]),
        num_prompt_tokens=num_tokens,
        block_table=list(range(first_block, first_block + num_blocks_for(num_tokens, BLOCK))),
    )


def prefill(num_tokens: int) -> list[SequenceSlice]:
    return [SequenceSlice(sequence=sequence(0, num_tokens, 0), start=0, num_tokens=num_tokens, sample=True)]


def decode(batch: int, draws: Mapping[str, float] = GREEDY) -> list[SequenceSlice]:
    blocks_each = num_blocks_for(CONTEXT, BLOCK)
    return [
        SequenceSlice(
            sequence=sequence(number, CONTEXT, number * blocks_each, draws),
            start=CONTEXT - 1,
            num_tokens=1,
            sample=True,
        )
        for number in range(batch)
    ]


def prefill_flops(num_tokens: int) -> float:
    return 2 * _LAYERS * num_tokens + _PAIR_FLOPS * num_tokens * (num_tokens + 1) / 2 + 2 * _HEAD


def measure(
    engines: dict[str, TorchEngine],
    ceilings: Sequence[Ceilings],
    peers: Sequence[Peer],
    best: Best,
    *,
    rounds: int,
    decodes: Sequence[int],
) -> None:
    for _ in range(rounds):
        for each in ceilings:
            each.measure(best)
        for name, engine in engines.items():
            for num_tokens in PREFILLS:
                slices = prefill(num_tokens)
                best.measure(f"{name} prefill {num_tokens}", partial(engine.execute, slices))
            for batch in decodes:
                steps = {what: decode(batch, draws) for what, draws in DRAWS.items()}
                for what, slices in [*steps.items()] * 3:
                    best.measure(f"{name} {what} {batch}", partial(engine.execute, slices))
        for peer in peers:
            for case, time_s in peer.measure().items():
                best.note(f"{peer.name} {case}", time_s)


def report(
    name: str, best: Best, flops: float, read_bytes: float, decodes: Sequence[int], limits: Limits | None
) -> None:
    print(f"{name}:")

    def judged(what: str, share: float, limit: float) -> str:
        return "" if limits is None else f"; {limits.at_least(f'{name} {what}', share, limit)}"

    for num_tokens in PREFILLS:
        time_s = best.times_s[f"{name} prefill {num_tokens}"]
        share = prefill_flops(num_tokens) / time_s / flops
        print(
            f"  prefill {num_tokens:5d}  {num_tokens / time_s:7.1f} tokens/s   {share:6.1%} of multiply-adds"
            f"{judged(f'prefill {num_tokens}', share, LEAST_PREFILL)}"
        )
    for batch, what in itertools.product(decodes, DRAWS):
        time_s = best.times_s[f"{name} {what} {batch}"]
        read = 2 * (NUM_WEIGHTS + batch * CONTEXT * 2 * SHAPE.num_layers * SHAPE.num_kv_heads * SHAPE.head_dim)
        step_flops = batch * (2 * NUM_WEIGHTS + _PAIR_FLOPS * CONTEXT)
        share = read / time_s / read_bytes
        print(
            f"  {what:14} {batch:2d}  {batch / time_s:7.1f} tokens/s   {share:6.1%} of"
            f" reading, {step_flops / time_s / flops:6.1%} of multiply-adds"
            f"{judged('decode 1', share, LEAST_DECODE) if (what, batch) == ('decode', 1) else ''}"
        )


def peer_cases(folder: str, *, types: Sequence[str], decodes: Sequence[int], **others: object) -> dict[str, object]:
    """What a peer measures, of Qwen2.5-0.5B's shape in some of GGUF's types."""
    fields = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    return {
        **{name: getattr(SHAPE, name) for name in fields},
        "folder": folder,
        "types": types,
        "prefills": PREFILLS,
        "decodes": decodes,
        "draws": DRAWS,
        "context": CONTEXT,
        "threads": 1,
        **others,
    }


def tokens_of(case: str) -> int:
    """Tokens of a step, by a case's name."""
    return int(case.rpartition(" ")[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--levels", nargs="+", default=None, help="default: all that the processor has, but amx")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--decodes", type=int, nargs="+", default=DECODES)
    parser.add_argument("--llama-cpp", metavar="VENV", help="measure llama.cpp beside it")
    parser.add_argument("--vllm", metavar="VENV", help="measure vLLM beside it")
    options = parser.parse_args()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # what is printed is the results
    torch.set_num_threads(1)
    levels = [level for level in FLAGS if level in (options.levels or processor_levels())]
    if not levels:
        unavailable("no compiled kernels")
    print(heading("CPU levels: Qwen2.5-0.5B's shape, random weights, one thread, CPU time"))
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        cases = peer_cases(directory, types=("BF16", "F16"), decodes=options.decodes)
        peers: list[Peer] = []
        if options.llama_cpp:
            peers.append(stack.enter_context(Peer(options.llama_cpp, "llama_cpp_speed.py", cases)))
        if options.vllm:
            peers.append(stack.enter_context(Peer(options.vllm, "vllm_speed.py", cases, [levels[0]])))
        checkpoint = write_config(Path(directory), shape=SHAPE, dtype="bfloat16")
        engines = {
            f"{level} {dtype}": TorchEngine(
                checkpoint, num_blocks=1024, block_size=BLOCK, dtype=dtype, cpu_level=level, has_random_weights=True
            )
            for level in levels
            for dtype in options.dtypes
            if dtype in level.suffixes
        }
        best, limits = Best(), Limits()
        ceilings = {level: Ceilings(Path(directory), level) for level in levels}
        measure(engines, list(ceilings.values()), peers, best, rounds=options.rounds, decodes=options.decodes)
        for level, each in ceilings.items():
            flops, read_bytes = each.flops(best), each.read_bytes(best)
            print(f"{level}: multiply-adds {flops / 1e9:.1f} GFLOP/s, reading {read_bytes / 1e9:.1f} GB/s")
        read_bytes = max(each.read_bytes(best) for each in ceilings.values())  # the memory is the same for all
        for name in engines:
            level = CpuLevel(name.split()[0])
            is_judged = level is not CpuLevel.BASELINE
            report(name, best, ceilings[level].flops(best), read_bytes, options.decodes, limits if is_judged else None)
        for case, time_s in best.times_s.items():
            if any(case.startswith(peer.name) for peer in peers):
                print(f"{case:60} {tokens_of(case) / time_s:7.1f} tokens/s")
    limits.end()


if __name__ == "__main__":
    main()
