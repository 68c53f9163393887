"""`pdmesh models`: the models on this machine's disk, and the models with short names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import typer

from pdmesh.cli.options import Output
from pdmesh.cli.tables import Column, Table
from pdmesh.engine.known_models import KNOWN_MODELS, models_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModel:
    """A model that can be named to `pdmesh up`. `num_bytes` is its size on disk; 0 before the download."""

    name: str
    num_bytes: int
    about: str


def list_models(output: Output) -> None:
    """Print the models, as a table or as JSON."""
    found = list(found_models())
    if output is Output.JSON:
        typer.echo(json.dumps([asdict(model) for model in found], indent=2))
        return
    table = Table([Column("model"), Column("size", right=True), Column("what it is")])
    for model in found:
        table.add(model.name, _size(model.num_bytes) if model.num_bytes else "", model.about)
    table.show()


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def found_models() -> Iterator[FoundModel]:
    """Yield the models with short names, then the models in the Hugging Face cache."""
    for name, model in KNOWN_MODELS.items():
        file = models_folder() / model.file_name
        num_bytes = file.stat().st_size if file.exists() else 0
        when = "" if num_bytes else "; is downloaded at first use"
        yield FoundModel(name=name, num_bytes=num_bytes, about=model.about + when)
    from huggingface_hub import constants

    for folder in sorted(Path(constants.HF_HUB_CACHE).glob("models--*")):
        blobs = [blob.stat().st_size for blob in folder.glob("blobs/*") if blob.is_file()]
        if blobs:
            name = folder.name.removeprefix("models--").replace("--", "/")
            yield FoundModel(name=name, num_bytes=sum(blobs), about="in the Hugging Face cache")
