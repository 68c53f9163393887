"""Options that several commands share, and the configuration they make."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pdmesh.config import CLIENT_KEY_VARIABLE, MeshConfig, load_config
from pdmesh.errors import ConfigError, PdmeshError


class Output(StrEnum):
    TABLE = "table"
    JSON = "json"


ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="TOML file; environment and flags win over it.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Any setting of `pdmesh config show`. Repeatable."),
]
Model = Annotated[
    str | None, typer.Option("--model", metavar="DIR_OR_HUB_ID", help="Checkpoint; the built-in demo if not given.")
]
Scheduler = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="Ask this scheduler, not a mesh of this machine.")
]
Name = Annotated[str, typer.Option("--name", help="Which mesh of this machine.")]
OutputFormat = Annotated[Output, typer.Option("-o", "--output", help="For people or for scripts.")]

Url = Annotated[str | None, typer.Option("--url", help="A gateway elsewhere, such as http://host:8000.")]
ClientKey = Annotated[
    str | None,
    typer.Option("--api-key", envvar=CLIENT_KEY_VARIABLE, help="A key of the gateway's; better from the environment."),
]

# The pools of a mesh, real or simulated; `make_pools` has the defaults.
Prefill = Annotated[int | None, typer.Option("--prefill", min=0, help="Prefill instances. [default: 1]")]
Decode = Annotated[int | None, typer.Option("--decode", min=0, help="Decode instances. [default: 1]")]
Mixed = Annotated[int, typer.Option("--mixed", min=0, help="Instances that do both.")]

Dtype = Annotated[str | None, typer.Option("--dtype", help="auto, float32 or bfloat16.")]
Device = Annotated[str | None, typer.Option("--device", help="auto, cpu or cuda.")]
Dial = Annotated[str | None, typer.Option("--scheduler", metavar="HOST:PORT", help="The scheduler to dial.")]


def write_file(path: Path, content: bytes) -> None:
    """Raises PdmeshError if it cannot be written."""
    try:
        path.write_bytes(content)
    except OSError as error:
        raise PdmeshError(f"cannot write {path}: {error.strerror}") from error


def build_config(file: Path | None, settings: list[str] | None, **flags: object) -> MeshConfig:
    """File < environment < ``--set`` < the named flags, given as ``section__field``. Raises ConfigError."""
    given: dict[str, object] = {}
    for setting in settings or []:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {setting!r}: wanted NAME=VALUE, such as gateway.port=8001")
        given[name.strip()] = value.strip()
    named = {name.replace("__", "."): value for name, value in flags.items() if value is not None}
    return load_config(file, os.environ, given | named)
