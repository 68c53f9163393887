"""Variants of a published GGUF file (SmolLM2-135M-Instruct, Q4_1): served as llama.cpp does, or refused in a sentence.

    python benchmarks/gguf_variants.py smollm2.gguf --peer VENV/bin/python [--only NAME ...]

The peer's venv has llama-cpp-python. A variant is right if texts are the same token ids, answers end with the same
tokens, and no greedy token (fp32, values as dequantised) is further below llama.cpp's likeliest than llama.cpp's own
rounding of activations to 8 bits explains; or if it is refused by one clear sentence, where it is to be.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from pdmesh.engine.files import load_model_info, resolve_model
from pdmesh.engine.gguf.gguf_blocks import values_of
from pdmesh.engine.gguf.gguf_reader import TYPES
from pdmesh.engine.runner import TorchEngine
from pdmesh.errors import ConfigError
from pdmesh_testing.gguf_files import GgufContent, content_of, encoded, write_parts
from pdmesh_testing.stepping import generate

TEXTS = ["The capital of France is", "<|im_start|>user\nName a colour.<|im_end|>\n<|im_start|>assistant\n"]
NUM_TOKENS = 8
#: Logits. The published file has gaps of up to 0.26: llama.cpp multiplies 8-bit activations.
MAX_GAP = 0.5
#: Layers whose matrices are quantised anew: with one bit a weight in many, the model is no model any more.
QUANTIZED_LAYERS = (2, 5)

Tensors = dict[str, tuple[tuple[int, ...], int, bytes]]


@dataclass(frozen=True, slots=True)
class Variant:
    """Writes a model below a folder, and returns what is served of it."""

    name: str
    write: Callable[[Path, GgufContent, Peer], Path]
    refusal: str = ""  # what the sentence says; empty: it is served
    peer_file: str = ""  # what llama.cpp is given, where it takes no folder


class Peer:
    """llama.cpp, in a process of its own."""

    def __init__(self, python: str) -> None:
        script = Path(__file__).parent / "native" / "llama_cpp_judge.py"
        self._process = subprocess.Popen(
            [python, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"llama.cpp's process ended at {request['op']}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def of_type(number: int) -> Callable[[Path, GgufContent, Peer], Path]:
    def write(folder: Path, content: GgufContent, peer: Peer) -> Path:
        tensors: Tensors = dict(content.tensors)
        for layer in QUANTIZED_LAYERS:
            for name in (f"blk.{layer}.ffn_down.weight", f"blk.{layer}.ffn_up.weight"):
                shape, stored, data = tensors[name]
                if shape[1] % TYPES[number].num_values:
                    continue
                blocks = np.frombuffer(data, np.uint8).reshape(-1, TYPES[stored].num_bytes)
                np.save(
                    folder / "values.npy", values_of(stored, torch.from_numpy(blocks.copy())).numpy().reshape(shape)
                )
                peer.ask(op="quantize", type=number, values=str(folder / "values.npy"), out=str(folder / "blocks"))
                tensors[name] = shape, number, (folder / "blocks").read_bytes()
                peer.ask(op="values", type=number, blocks=str(folder / "blocks"), out=str(folder / "values.npy"))
                blocks = np.fromfile(folder / "blocks", np.uint8).reshape(-1, TYPES[number].num_bytes)
                found = values_of(number, torch.from_numpy(blocks)).numpy().ravel()
                if not np.array_equal(found, np.load(folder / "values.npy")):
                    raise AssertionError(f"{name} in {TYPES[number].name} stands for other values in llama.cpp")
        return _file(folder, content.metadata, tensors)

    return write


def with_tensors(**added: tuple[tuple[int, ...], float]) -> Callable[[Path, GgufContent, Peer], Path]:
    """Add fp32 tensors of a shape and deviation to each layer, or beside them; ``_`` of a name's end is a dot."""

    def write(folder: Path, content: GgufContent, peer: Peer) -> Path:
        tensors, rng = dict(content.tensors), np.random.default_rng(0)
        for name, (shape, deviation) in added.items():
            own_name = ".".join(name.rsplit("_", 1))
            num_layers = content.metadata["llama.block_count"]
            names = [own_name] if own_name.startswith("rope") else [f"blk.{n}.{own_name}" for n in range(num_layers)]
            for each in names:
                values = rng.standard_normal(shape).astype("<f4") * np.float32(deviation) + np.float32("rope" in each)
                tensors[each] = shape, 0, np.abs(values).tobytes() if "rope" in each else values.tobytes()
        return _file(folder, content.metadata, tensors)

    return write


def with_fields(**changed: Any) -> Callable[[Path, GgufContent, Peer], Path]:
    """Change fields: ``__`` in a name is a dot, None takes a field away."""

    def write(folder: Path, content: GgufContent, peer: Peer) -> Path:
        fields = {**content.metadata, **{name.replace("__", "."): value for name, value in changed.items()}}
        return _file(folder, {name: value for name, value in fields.items() if value is not None}, content.tensors)

    return write


def with_normal_ends(folder: Path, content: GgufContent, peer: Peer) -> Path:
    """All tokens are ordinary ones by their type, and the file names another end."""
    types = [1] * len(content.metadata["tokenizer.ggml.tokens"])
    return with_fields(tokenizer__ggml__token_type=types, tokenizer__ggml__eos_token_id=0)(folder, content, peer)


def in_parts(number: int, *, lost: int | None = None) -> Callable[[Path, GgufContent, Peer], Path]:
    def write(folder: Path, content: GgufContent, peer: Peer) -> Path:
        paths = write_parts(folder / "parts", content, 3)
        if lost is not None:
            paths[lost].unlink()
        return paths[number]

    return write


def in_folder(folder: Path, content: GgufContent, peer: Peer) -> Path:
    return _file(folder, content.metadata, content.tensors).parent


def untied(folder: Path, content: GgufContent, peer: Peer) -> Path:
    """A head of its own: the embedding's rows, in other places."""
    shape, number, data = content.tensors["token_embd.weight"]
    rows = np.frombuffer(data, np.uint8).reshape(shape[0], -1)
    head = np.roll(rows, 1, axis=0).tobytes()
    return _file(folder, content.metadata, {**content.tensors, "output.weight": (shape, number, head)})


def of_unknown_type(folder: Path, content: GgufContent, peer: Peer) -> Path:
    shape, _, data = content.tensors["blk.0.ffn_up.weight"]
    return _file(folder, content.metadata, {**content.tensors, "blk.0.ffn_up.weight": (shape, 31, data)})


def _file(folder: Path, metadata: dict[str, Any], tensors: Tensors) -> Path:
    path = folder / "models" / "model.gguf"
    path.parent.mkdir()
    path.write_bytes(encoded(metadata, tensors))
    return path


def variants() -> Iterator[Variant]:
    yield Variant("as published", with_fields())
    for number, stored in TYPES.items():
        if stored.name not in ("Q4_1",):
            yield Variant(stored.name, of_type(number))
    yield Variant("parts, by the first", in_parts(0))
    yield Variant("parts, by the last", in_parts(2), peer_file="parts/model-00001-of-00003.gguf")
    yield Variant("parts, one missing", in_parts(0, lost=1), refusal="there is no model-00002-of-00003.gguf")
    yield Variant("alone in a folder", in_folder, peer_file="models/model.gguf")
    yield Variant("type of another time", of_unknown_type, refusal="is of GGML's type Q4_0_4_4, which is not served")
    yield Variant(
        "q, k, v biases",
        with_tensors(attn_q_bias=((576,), 1.0), attn_k_bias=((192,), 1.0), attn_v_bias=((192,), 0.2)),
    )
    yield Variant("output biases", with_tensors(attn_output_bias=((576,), 0.1)))
    yield Variant(
        "MLP biases",
        with_tensors(ffn_gate_bias=((1536,), 0.2), ffn_up_bias=((1536,), 0.2), ffn_down_bias=((576,), 0.1)),
    )
    yield Variant(
        "q norms", with_tensors(attn_q_norm_weight=((64,), 1.0)), refusal="reads the tensor 'blk.0.attn_q_norm"
    )
    yield Variant("divisors of frequencies", with_tensors(rope_freqs_weight=((32,), 0.5)))
    yield Variant("head of its own", untied)
    yield Variant("ends of type normal", with_normal_ends)
    yield Variant("no types of tokens", with_fields(tokenizer__ggml__token_type=None))
    yield Variant("texts end with a token", with_fields(tokenizer__ggml__add_eos_token=True))
    yield Variant("texts begin with a token", with_fields(tokenizer__ggml__add_bos_token=True))
    yield Variant("no splitter", with_fields(tokenizer__ggml__pre=None))
    yield Variant("splitter llama3", with_fields(tokenizer__ggml__pre="llama3", tokenizer__ggml__add_bos_token=None))
    yield Variant("splitter deepseek-coder", with_fields(tokenizer__ggml__pre="deepseek-coder"))
    yield Variant(
        "splitter of another time", with_fields(tokenizer__ggml__pre="next-bpe"), refusal="splits texts by 'next"
    )
    yield Variant("pooled", with_fields(llama__pooling_type=3))
    yield Variant("linear scaling", with_fields(llama__rope__scaling__type="linear", llama__rope__scaling__factor=2.0))
    yield Variant("other base", with_fields(llama__rope__freq_base=5e5))
    yield Variant("templates by name", with_fields(**{"tokenizer.chat_template.tool_use": "{{ tools }}"}))


def check(variant: Variant, content: GgufContent, peer: Peer) -> str:
    """Return what is wrong with a variant; empty: nothing."""
    with tempfile.TemporaryDirectory() as name, _cache(Path(name) / "cache"):
        folder = Path(name)
        path = variant.write(folder, content, peer)
        try:
            directory = resolve_model(str(path))
            engine = TorchEngine(directory, num_blocks=8, dtype="float32")
        except ConfigError as error:
            if variant.refusal and variant.refusal in str(error) and "\n" not in str(error):
                return ""
            return f"refused: {error}"
        if variant.refusal:
            return "served"
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        ids = [tokenizer.encode(text).ids for text in TEXTS]
        continuations = [generate(engine, prompt, NUM_TOKENS).output_ids for prompt in ids]
        file = folder / variant.peer_file if variant.peer_file else path
        verdict = peer.ask(op="judge", path=str(file), texts=TEXTS, continuations=continuations)
        if verdict.get("refused"):
            return "llama.cpp refuses it"
        if verdict["ids"] != ids:
            return f"ids {ids}, of llama.cpp {verdict['ids']}"
        if verdict["ends"] != sorted(load_model_info(directory).eos_token_ids):
            return f"ends {load_model_info(directory).eos_token_ids}, of llama.cpp {verdict['ends']}"
        worst = max(verdict["gaps"])
        print(f"    largest gap {worst:.3f}; {tokenizer.decode(continuations[0])!r}")
        return "" if worst <= MAX_GAP else f"a token is {worst:.2f} below llama.cpp's"


def _with_layers(content: GgufContent, count: int) -> GgufContent:
    """Return a model of the first layers alone."""
    kept = {
        name: each
        for name, each in content.tensors.items()
        if not name.startswith("blk.") or int(name.split(".")[1]) < count
    }
    return GgufContent({**content.metadata, "llama.block_count": count}, kept)


@contextmanager
def _cache(folder: Path) -> Iterator[None]:
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["XDG_CACHE_HOME"]
        else:
            os.environ["XDG_CACHE_HOME"] = before


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--peer", required=True, help="python of a venv with llama-cpp-python")
    parser.add_argument("--only", nargs="*", help="names of variants")
    parser.add_argument("--share", default="1/1", help="which part of the variants: 2/5 is the second fifth")
    parser.add_argument("--layers", type=int, default=30, help="number of the file's layers that variants have")
    options = parser.parse_args()
    content, peer = _with_layers(content_of(options.file), options.layers), Peer(options.peer)
    number, count = map(int, options.share.split("/"))
    chosen = [each for each in variants() if options.only is None or each.name in options.only][number - 1 :: count]
    num_right = 0
    for variant in chosen:
        wrong = check(variant, content, peer)
        num_right += not wrong
        print(f"{'WRONG' if wrong else 'right'}  {variant.name}{f': {wrong}' if wrong else ''}", flush=True)
    peer.close()
    print(f"{num_right} of {len(chosen)} variants are right")
    return 0 if num_right == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
