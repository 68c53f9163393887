"""Damaged files are refused with one sentence: event logs, checkpoints, configuration. Never a traceback.

A few hundred mutants here; ``make fuzz`` draws 5,000 of each. FUZZ_NUMBER and FUZZ_SEED say how many and which.
"""

from __future__ import annotations

import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import FrameType

import msgpack
import pytest

from pdmesh.cli.options import Output
from pdmesh.config import MeshConfig, WorkerConfig
from pdmesh.config_sources import load_config, to_toml
from pdmesh.engine.architectures import architectures, parse_model_config
from pdmesh.engine.files import load_model_config, load_model_info, resolve_model
from pdmesh.errors import ConfigError
from pdmesh.worker.engines import build_engine
from pdmesh_gateway.model_tokenizer import ModelTokenizer
from pdmesh_lab.cli.options import ReplayOptions
from pdmesh_lab.cli.replay import run_replay
from pdmesh_testing.checkpoints import TINY, write_checkpoint
from pdmesh_testing.gguf_files import write_gguf
from pdmesh_testing.mutants import damaged_bytes, damaged_sequence, damaged_tree
from pdmesh_testing.quantized_checkpoints import FORMATS, write_quantized
from pdmesh_testing.recorded import record_run
from pdmesh_testing.transformers_checkpoints import model_variants, transformers_config

NUMBER = int(os.environ.get("FUZZ_NUMBER", "150"))
SEED = int(os.environ.get("FUZZ_SEED", "0"))

#: For one mutant: none may keep a machine busy, or take its memory. In seconds of the processor, which others share.
LIMIT_S = 20
MEMORY_BYTES = 8 << 30

pytestmark = pytest.mark.timeout(60 + NUMBER)


class TooSlow(BaseException):
    pass


@contextmanager
def limits() -> Iterator[None]:
    def too_slow(number: int, frame: FrameType | None) -> None:
        raise TooSlow

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGPROF, too_slow)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def judge(make: Callable[[random.Random], str], read: Callable[[], object], found_before: tuple[int, ...] = ()) -> None:
    """Draw and read mutants, those ``found_before`` among them; a ConfigError of one line is an answer, and so is
    success. Fails for anything else.
    """
    outcomes: Counter[str] = Counter()
    findings: list[str] = []
    with limits():
        for index in sorted({*range(NUMBER), *found_before}):
            rng = random.Random(f"{SEED}/{index}")
            what = make(rng)
            signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
            try:
                with redirect_stdout(io.StringIO()):
                    read()
                outcomes["read"] += 1
            except ConfigError as error:
                outcomes["refused"] += 1
                if not 0 < len(str(error)) < 2000 or "\n" in str(error).strip():
                    findings.append(f"seed {SEED}/{index}, {what}: no sentence: {str(error)[:300]!r}")
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                findings.append(f"seed {SEED}/{index}, {what}: {type(error).__name__}: {str(error)[:300]}")
            signal.setitimer(signal.ITIMER_PROF, 0)
    sys.stdout.write(f"{NUMBER} mutants of seed {SEED}: {dict(outcomes)}, {len(findings)} findings\n")
    assert not findings, "\n".join(findings[:40])


# --- event logs ---


def records_of(data: bytes) -> list[bytes]:
    return [payload for _, payload in msgpack.Unpacker(io.BytesIO(data))]


def log_of(payloads: list[bytes]) -> bytes:
    return b"".join(msgpack.packb([zlib.crc32(payload), payload]) for payload in payloads)


def packed(payload: object) -> bytes:
    return msgpack.packb(payload, unicode_errors="surrogatepass", default=str)


def test_damaged_event_logs(tmp_path: Path) -> None:
    whole, mutant = tmp_path / "whole.log", tmp_path / "mutant.log"
    record_run(whole)
    data = whole.read_bytes()
    payloads = records_of(data)
    # Without the digests of what was answered, a replay goes on over what makes no sense.
    unchecked = [payload for payload in payloads if len(msgpack.unpackb(payload)) != 1]
    options = ReplayOptions(log=mutant)
    asked = options

    def make(rng: random.Random) -> str:
        nonlocal asked
        asked = options
        if rng.random() < 0.3:  # what comes of it is looked at in full
            asked = replace(options, bundle="sjf", perfetto=tmp_path / "trace.json")
        kind = rng.choice(("bytes", "records", "value"))
        records = rng.choice((payloads, unchecked))
        if kind == "bytes":
            mutant.write_bytes(damaged_bytes(rng, data))
        elif kind == "records":
            mutant.write_bytes(log_of(records[:1] + damaged_sequence(rng, records[1:])))
        else:  # with checksums that are right: what a log of another version may look like
            changed = list(records)
            for _ in range(rng.choice((1, 1, 3))):
                at = rng.choice((0, rng.randrange(len(changed))))
                try:
                    changed[at] = packed(damaged_tree(rng, msgpack.unpackb(changed[at], strict_map_key=False)))
                except (OverflowError, ValueError):  # no msgpack: another one
                    continue
            mutant.write_bytes(log_of(changed))
        return kind

    judge(make, lambda: run_replay(asked, Output.JSON), found_before=(1376,))  # chunks of -16 tokens


# --- checkpoints ---


def test_damaged_checkpoints(tmp_path: Path) -> None:
    """Plain ones and, in turns, of every quantised format."""
    directory = tmp_path / "model"
    shape = replace(TINY, max_position_embeddings=256)
    sources = [write_checkpoint(directory, shape=shape)]
    for quantized_format in FORMATS:
        sources.append(write_quantized(directory, tmp_path / quantized_format, quantized_format)[0])
    models = [{file.name: file.read_bytes() for file in source.iterdir()} for source in sources]
    config = MeshConfig(model=str(directory), worker=WorkerConfig(kv_cache_bytes=1 << 20, device="cpu"))

    def make(rng: random.Random) -> str:
        originals = models[0] if rng.random() < 0.5 else rng.choice(models)
        for name, data in originals.items():
            (directory / name).write_bytes(data)
        name = rng.choice(sorted(originals))
        if name.endswith(".json") and rng.random() < 0.7:
            text = json.dumps(damaged_tree(rng, json.loads(originals[name])))
            (directory / name).write_text(text, errors="surrogatepass")
        else:
            head = originals[name][:2048] if name.endswith(".safetensors") and rng.random() < 0.7 else originals[name]
            (directory / name).write_bytes(damaged_bytes(rng, head) + originals[name][len(head) :])
        return name

    def read() -> None:
        load_model_info(directory)
        load_model_config(directory)
        ModelTokenizer.load(directory)
        build_engine(config, 0)

    judge(make, read)


def test_damaged_gguf_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    source = write_checkpoint(tmp_path / "source", shape=replace(TINY, max_position_embeddings=256))
    write_gguf(source, file, "Q8_0")
    original = file.read_bytes()
    end = original.index(b"token_embd.weight") + 4096  # of the header, or nearly
    worker = WorkerConfig(kv_cache_bytes=1 << 20, device="cpu")
    build_engine(MeshConfig(model=str(source), worker=worker), 0)  # imports torch, which takes longer than a mutant may

    def make(rng: random.Random) -> str:
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        begin = rng.choice((0, 0, end - 8192))  # tokens are most of it
        head = damaged_bytes(rng, original[max(0, begin) : end])
        file.write_bytes(original[: max(0, begin)] + head + original[end:])
        return "gguf"

    def read() -> None:
        directory = resolve_model(str(file))
        ModelTokenizer.load(directory)
        build_engine(MeshConfig(model=str(directory), worker=worker), 0)

    judge(make, read)


def test_damaged_model_configurations() -> None:
    """Of every architecture, as transformers writes them."""
    variants = [(model_type, options) for model_type, models in model_variants().items() for options in models]
    trees = [json.loads(transformers_config(name, **options).to_json_string()) for name, options in variants]
    classes = {architecture.model_type: architecture.class_name for architecture in architectures().values()}
    raw: dict[str, object] = {}

    def make(rng: random.Random) -> str:
        tree = rng.choice(trees)
        raw.clear()
        raw.update({**damaged_tree(rng, tree), "architectures": [classes[tree["model_type"]]]})
        return str(tree["model_type"])

    def read() -> None:
        config = parse_model_config(raw, "config.json")
        assert config.num_weights >= config.num_parameters > 0
        assert config.kv_layout(dtype="auto", block_size=16).num_layers == len(config.kv_layers)

    judge(make, read)


# --- configuration ---


def test_damaged_configuration(tmp_path: Path) -> None:
    file = tmp_path / "pdmesh.toml"
    data = to_toml(MeshConfig()).encode()

    def make(rng: random.Random) -> str:
        file.write_bytes(damaged_bytes(rng, data))
        return "toml"

    judge(make, lambda: load_config(file, {}, {}))
