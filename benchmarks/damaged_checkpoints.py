"""Damaged, truncated and lying checkpoints and GGUF files: `python benchmarks/damaged_checkpoints.py --files 5000`.

Each is loaded and computes two tokens, or is refused in one sentence; anything else is counted and its first cases are
named.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import resource
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import structlog

from pdmesh.engine.files import resolve_model
from pdmesh.engine.gguf.gguf_reader import TYPES
from pdmesh.engine.runner import TorchEngine
from pdmesh.errors import ConfigError
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.gguf_files import GgufContent, GgufType, content_of, encoded, write_gguf
from pdmesh_testing.quantized_checkpoints import Format, write_mxfp4, write_quantized
from pdmesh_testing.stepping import generate
from pdmesh_testing.transformers_checkpoints import write_transformers_checkpoint

FORMATS: tuple[Format, ...] = (
    "int4-zeros", "int8-channel", "awq", "gptq-order", "fp8-channel", "fp8-blocks", "bnb-nf4", "bnb-nested",
)  # fmt: skip
GGUF_MODELS: tuple[tuple[str, GgufType, dict[str, Any]], ...] = (
    (
        "qwen3_moe",
        "Q8_0",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    ("gpt_oss", "MXFP4", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24, "head_dim": 16}),
    ("gemma3_text", "Q4_0", {"head_dim": 16, "sliding_window": 24, "num_hidden_layers": 7}),
    ("phi3", "Q8_0", {"sliding_window": None}),
)
HEADER_BYTES = 6000  # where most damage is done: what follows is numbers, which are any


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Cut, or with some bytes changed."""
    if rng.random() < 0.15:
        return data[: rng.randrange(len(data))]
    changed = bytearray(data)
    reach = min(len(data), HEADER_BYTES if rng.random() < 0.8 else len(data))
    for _ in range(rng.choice((1, 1, 2, 8))):
        place = rng.randrange(reach)
        changed[place] = rng.choice((rng.randrange(256), changed[place] ^ (1 << rng.randrange(8)), 0xFF, 0x30))
    return bytes(changed)


LIES: tuple[Any, ...] = (
    0, 1, 3, 31, 2**31, 2**32 - 1, 0.0, -1.0, 0.5, float("nan"), float("inf"), "", "yarn", "longrope", True, [], [0, 1],
    [1.0, float("nan")], ["a", "b"], [True] * 2000,
)  # fmt: skip


def lying(content: GgufContent, rng: random.Random) -> bytes:
    """Return a GGUF file that is whole, and says other things of itself, of its tokenizer or of its tensors."""
    metadata, tensors = dict(content.metadata), dict(content.tensors)
    for _ in range(rng.choice((1, 1, 2, 4))):
        name = rng.choice(list(tensors))
        shape, number, data = tensors[name]
        match rng.randrange(6):
            case 0:
                del tensors[name]
            case 1:
                tensors[name] = shape[::-1] if len(shape) > 1 else (1, *shape), number, data
            case 2:
                tensors[name] = shape, rng.choice(tuple(TYPES)), data
            case _:
                metadata[rng.choice(list(metadata))] = rng.choice(LIES)
    return encoded(metadata, tensors)


def write_with_sentence_piece(file: Path, like: Path) -> Path:
    """Write the model of a file with a tokenizer of SentencePiece's kind."""
    content = content_of(like)
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + ["<s>", "</s>", *"abcd", "ab", "cd", "abcd"]
    pieces += [f"<unused{number}>" for number in range(len(content.metadata["tokenizer.ggml.tokens"]) - len(pieces))]
    fields = {
        "model": "llama",
        "tokens": pieces,
        "token_type": [6] * 256 + [3, 3] + [1] * (len(pieces) - 258),
        "scores": [-float(number) for number in range(len(pieces))],
        "bos_token_id": 256,
        "eos_token_id": 257,
    }
    metadata = {key: value for key, value in content.metadata.items() if not key.startswith("tokenizer.")}
    metadata |= {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    file.write_bytes(encoded(metadata, content.tensors))
    return file


def outcome(model: Path) -> str:
    """Return "loaded", "refused", or what went wrong."""
    try:
        engine = TorchEngine(resolve_model(str(model)), num_blocks=1, num_threads=1, dtype="bfloat16")
        generate(engine, [1, 2, 3], 2)
    except ConfigError as error:
        return "refused" if "\n" not in str(error) else f"several lines: {error}"
    except Exception as error:  # what is looked for
        return f"{type(error).__name__}: {error}"
    return "loaded"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    rng = random.Random(options.seed)
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        source = write_checkpoint(folder / "source")
        write_gguf(source, folder / "model.gguf", "Q8_0")
        cases = [folder / "model.gguf"]
        for number, (model_type, gguf_type, fields) in enumerate(GGUF_MODELS):
            model = write_transformers_checkpoint(folder / f"model-{number}", model_type, **fields)
            cases.append(folder / f"model-{number}.gguf")
            write_gguf(model, cases[-1], gguf_type)
        cases.append(write_with_sentence_piece(folder / "pieces.gguf", folder / "model.gguf"))
        for quantized_format in FORMATS:
            directory, _ = write_quantized(source, folder / quantized_format, quantized_format)
            cases += [directory / "model.safetensors", directory / "config.json"]
        gpt_oss, _ = write_mxfp4(folder)
        cases += [gpt_oss / "model.safetensors", gpt_oss / "config.json"]
        originals = {path: path.read_bytes() for path in cases}
        contents = {path: content_of(path) for path in cases if path.suffix == ".gguf"}
        before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(options.files):
            path = cases[number % len(cases)]
            lies = path in contents and rng.random() < 0.5
            path.write_bytes(lying(contents[path], rng) if lies else damaged(originals[path], rng))
            outcomes[outcome(path if path.suffix == ".gguf" else path.parent)] += 1
            path.write_bytes(originals[path])
        grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    wrong = {what: count for what, count in outcomes.items() if what not in ("loaded", "refused")}
    print(f"{options.files} files: {outcomes['refused']} refused in a sentence, {outcomes['loaded']} loaded")
    print(f"{sum(wrong.values())} otherwise; memory grew by {grown_kib / 1024:.0f} MiB at most")
    for what, count in list(wrong.items())[:20]:
        print(f"  {count} x {what[:300]}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
