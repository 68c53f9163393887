"""How far engines are from a model in fp32: `python benchmarks/quality.py MODEL [MODEL ...] [--llama-cpp VENV]`.

MODEL is a GGUF file or a checkpoint's directory. All engines are given the same windows of text that ships with Python
(docstrings, its reference manual, code), and each position's logits are compared with those of the fp32 engine, which
is compared with transformers' modules first. Columns: KL divergence (mean, 99th percentile, largest), positions whose
most likely token is another one (and of these, where fp32's best two are further apart than 0.1), positions of which
the best two are equal, and perplexity.

`--llama-cpp VENV` measures llama.cpp beside it on the same file (a venv with `llama-cpp-python`). `--plain` adds a
bf16 checkpoint made from each model, with transformers' modules in bf16 beside it.
"""

from __future__ import annotations

import argparse
import array
import ast
import json
import math
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from pydoc_data import topics
from typing import Any

import numpy as np
import structlog
import torch
from peers import Peer
from report import Limits, heading
from tokenizers import Tokenizer
from torch import Tensor

from pdmesh.engine.base import EngineSequence, SequenceSlice
from pdmesh.engine.files import load_model_config, resolve_model
from pdmesh.engine.forward import step_spans
from pdmesh.engine.model_config import ModelConfig
from pdmesh.engine.model_loading import ComputeOptions, load_model
from pdmesh.engine.rope import rotation_order
from pdmesh.engine.tensors import open_tensors
from pdmesh.model import RequestId, SamplingParams

WINDOW = 1024  # tokens
ROWS = 128  # of which logits are compared at once
BLOCK = 16
CLEAR_GAP = 0.1  # of fp32's best two logits
EQUAL_KL = 1e-6  # of the fp32 engine from transformers' modules

#: An engine's logits of a window, of some of its positions.
Logits = Callable[[int, int], Tensor]


def texts() -> list[str]:
    """Text by kind: docstrings twice, since they are half of the windows."""
    files = [path for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")) if path.name[0] != "_"]
    sources = [path.read_text(encoding="utf-8", errors="ignore") for path in files]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = (node for source in sources for node in ast.walk(ast.parse(source)) if isinstance(node, documented))
    docstrings = "\n\n".join(filter(None, map(ast.get_docstring, nodes)))
    half = len(docstrings) // 2
    return [docstrings[:half], "\n\n".join(topics.topics.values()), docstrings[half:], "\n".join(sources)]


def windows_of(directory: Path, num_positions: int) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    begin = tokenizer.encode("").ids
    length = WINDOW - len(begin)
    num_windows = -(-num_positions // WINDOW)
    of_kinds = []
    for text in texts():
        ids = tokenizer.encode(text[: 8 * length * num_windows], add_special_tokens=False).ids
        of_kinds.append([begin + ids[first : first + length] for first in range(0, len(ids) - length, length)])
    return list(chain.from_iterable(zip(*of_kinds, strict=False)))[:num_windows]


class OwnEngine:
    """One of our engines; ``dtype`` and ``cpu_level`` as they are configured."""

    def __init__(self, directory: Path, dtype: str, cpu_level: str = "auto") -> None:
        options = ComputeOptions(device=torch.device("cpu"), block_size=BLOCK, dtype=dtype, cpu_level=cpu_level)
        self._compute = load_model(directory, options).compute(WINDOW // BLOCK)
        self.name = f"pdmesh {dtype} ({self._compute.arithmetic})"

    def open(self, window: Sequence[int], stack: ExitStack) -> Logits:
        sequence = EngineSequence(
            request_id=RequestId("quality"),
            params=SamplingParams(max_tokens=1),
            token_ids=array.array("i", window),
            num_prompt_tokens=len(window),
            block_table=list(range(-(-len(window) // BLOCK))),
        )
        batch = [SequenceSlice(sequence=sequence, start=0, num_tokens=len(window), sample=True)]
        output = stack.enter_context(self._compute.forward.step(batch, step_spans(batch), None))
        return lambda first, end: output.logits(range(first, end))


class Modules:
    """transformers' modules."""

    def __init__(self, modules: Any, name: str) -> None:
        self._modules = modules
        self.name = name

    def open(self, window: Sequence[int], stack: ExitStack) -> Logits:
        del stack
        logits: Tensor = self._modules(input_ids=torch.tensor([list(window)]), use_cache=False).logits[0]
        return lambda first, end: logits[first:end].float()


class LlamaCpp:
    """llama.cpp, which is asked for all windows in their order."""

    def __init__(self, peer: Peer, folder: Path) -> None:
        self._peer = peer
        self._file = folder / "logits.npy"
        self.name = peer.name

    def open(self, window: Sequence[int], stack: ExitStack) -> Logits:
        del window, stack
        self._peer.measure()
        logits = np.load(self._file, mmap_mode="r")
        return lambda first, end: torch.from_numpy(np.array(logits[first:end]))


Engine = OwnEngine | Modules | LlamaCpp


@dataclass(slots=True)
class Distance:
    """How far an engine was from the reference, of all positions so far."""

    kl: list[Tensor] = field(default_factory=lambda: list[Tensor]())
    surprise: list[Tensor] = field(default_factory=lambda: list[Tensor]())
    num_other: int = 0
    num_clear: int = 0
    num_tied: int = 0

    def add(self, expected: Tensor, found: Tensor, following: Tensor) -> None:
        """Compare logits of positions; ``following``: the text's next tokens, of one position less at its end."""
        wanted, given = (torch.log_softmax(logits.double(), dim=-1) for logits in (expected, found))
        self.kl.append((wanted.exp() * (wanted - given)).sum(dim=-1))
        self.surprise.append(-given[: len(following)].gather(1, following[:, None])[:, 0])
        best, found_best = (logits.topk(2, dim=-1).values for logits in (expected, found))
        is_other = expected.argmax(dim=-1) != found.argmax(dim=-1)
        self.num_other += int(is_other.sum())
        self.num_clear += int((is_other & (best[:, 0] - best[:, 1] > CLEAR_GAP)).sum())
        self.num_tied += int((found_best[:, 0] == found_best[:, 1]).sum())

    @property
    def mean_kl(self) -> float:
        return float(torch.cat(self.kl).mean())

    def row(self) -> str:
        kl = torch.cat(self.kl)
        p99, largest = float(kl.quantile(0.99)), float(kl.max())
        top1 = 1 - self.num_other / len(kl)
        perplexity = math.exp(float(torch.cat(self.surprise).mean()))
        return (
            f"{self.mean_kl:.2e} | {p99:.1e} | {largest:.1e} | {top1:.2%} | {self.num_other} ({self.num_clear}) | "
            f"{self.num_tied / len(kl):.1%} | {perplexity:.4f}"
        )


@torch.inference_mode()
def compare(reference: Engine, engines: Sequence[Engine], windows: Sequence[Sequence[int]]) -> list[Distance]:
    """Distances of the reference from itself, then of the engines."""
    distances = [Distance() for _ in range(1 + len(engines))]
    for window in windows:
        with ExitStack() as stack:
            all_logits = [engine.open(window, stack) for engine in (reference, *engines)]
            for first in range(0, len(window), ROWS):
                end = min(first + ROWS, len(window))
                following = torch.tensor(window[first + 1 : end + 1])
                expected, *others = (logits(first, end) for logits in all_logits)
                for distance, found in zip(distances, (expected, *others), strict=True):
                    distance.add(expected, found, following)
    return distances


def modules_of(directory: Path) -> Any:
    """transformers' modules in fp32, of any checkpoint that we read."""
    import transformers

    if not (directory / "model.gguf").exists():
        return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    config = load_model_config(directory)
    assert isinstance(config, ModelConfig)
    fields = json.loads((directory / "config.json").read_text())
    fields.pop("quantization_config")
    kind = getattr(transformers, config.architecture)
    modules = kind(kind.config_class(**{**fields, "dtype": "float32"})).eval()
    order = rotation_order(
        config.head_dim, config.rotary_dim or config.head_dim, interleaves=config.interleaves_rotation
    )
    with ExitStack() as stack, torch.no_grad():
        tensors = stack.enter_context(open_tensors(directory, config, torch.float32))
        for name, weight in modules.named_parameters():
            values = tensors.read(name, tuple(weight.shape)).float()
            if order is not None and any(each in name for each in ("q_proj", "k_proj")):
                values = values.view(-1, config.head_dim, values.shape[1])[:, order].flatten(0, 1)
            if "Gemma" in config.architecture and name.endswith("norm.weight"):
                values = values - 1  # the file has what hidden states are multiplied by
            weight.copy_(values)
    return modules


def plain_checkpoint(modules: Any, tokenizer: Path, folder: Path) -> Path:
    """A checkpoint in bf16 with a model's values."""
    modules.bfloat16().save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    return folder


def report(title: str, reference: Engine, engines: Sequence[Engine], windows: Sequence[Sequence[int]]) -> list[float]:
    """Print a table; return the engines' mean KL divergences."""
    print(f"\n{title}: {sum(map(len, windows))} positions, reference {reference.name}")
    print("| engine | KL mean | p99 | max | top-1 | changed (gap > 0.1) | tied | perplexity |")
    print("|---|---|---|---|---|---|---|---|")
    own, *others = compare(reference, engines, windows)
    for name, distance in [(reference.name, own), *zip((each.name for each in engines), others, strict=True)]:
        print(f"| {name} | {distance.row()} |", flush=True)
    return [distance.mean_kl for distance in others]


def engines_of(directory: Path, dtypes: Sequence[str], levels: Sequence[str]) -> list[OwnEngine]:
    return [OwnEngine(directory, dtype, level) for dtype in dtypes for level in levels]


def check_reference(directory: Path, reference: Engine, window: Sequence[int], limits: Limits) -> Any:
    """Compare the fp32 engine with transformers' modules, which are returned."""
    modules = modules_of(directory)
    _, distance = compare(Modules(modules, "transformers"), [reference], [window])
    judged = limits.at_most("the fp32 engine's KL from transformers", distance.mean_kl, EQUAL_KL)
    print(f"fp32 engine from transformers' modules in fp32: KL {distance.mean_kl:.1e}, {judged}")
    return modules


def measure(model: str, options: argparse.Namespace, limits: Limits) -> None:
    directory = resolve_model(model)
    windows = windows_of(directory, options.positions)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        reference = OwnEngine(directory, "float32")
        modules = check_reference(directory, reference, windows[0][:256], limits)
        if not options.plain:
            del modules
        engines: list[Engine] = [*engines_of(directory, options.dtypes, options.levels)]
        if options.llama_cpp and model.endswith(".gguf"):
            asked = {"file": model, "folder": str(folder), "windows": windows, "threads": options.threads}
            peer = stack.enter_context(Peer(options.llama_cpp, "llama_cpp_logits.py", asked))
            engines.append(LlamaCpp(peer, folder))
        own_kl, *other_kl = report(Path(model).name, reference, engines, windows)
        if len(engines) > len(options.dtypes) * len(options.levels):
            print(f"KL of {engines[0].name} over llama.cpp's: {limits.at_most('llama.cpp', own_kl, other_kl[-1])}")
        if not options.plain:
            return
        del engines, reference
        plain = plain_checkpoint(modules, directory / "tokenizer.json", folder / "plain")
        beside: list[Engine] = [*engines_of(plain, ["auto"], options.levels), Modules(modules, "transformers bfloat16")]
        own_kl, *other_kl = report(f"{Path(model).name} in bf16", OwnEngine(plain, "float32"), beside, windows)
        print(f"KL of {beside[0].name} over transformers': {limits.at_most('transformers', own_kl, other_kl[-1])}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--positions", type=int, default=20_000)
    parser.add_argument("--dtypes", nargs="+", default=["auto", "bfloat16"])
    parser.add_argument("--levels", nargs="+", default=["auto"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--plain", action="store_true", help="measure a bf16 checkpoint made from each model, too")
    parser.add_argument("--llama-cpp", metavar="VENV", help="measure llama.cpp beside it")
    options = parser.parse_args()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # what is printed is the results
    torch.set_num_threads(options.threads)
    limits = Limits()
    print(heading("Quality: distance from fp32 on text that ships with Python"))
    for model in options.models:
        measure(model, options, limits)
    limits.end()


if __name__ == "__main__":
    main()
