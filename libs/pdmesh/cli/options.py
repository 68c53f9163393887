"""Options that several commands share, and the configuration they make."""

from __future__ import annotations

import functools
import inspect
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec

import typer

from pdmesh.cli.state import DEFAULT_NAME, StateFolder, state_folder
from pdmesh.errors import ConfigError, PdmeshError
from pdmesh.settings import CLIENT_KEY_VARIABLE

if TYPE_CHECKING:  # ``--help`` needs no configuration
    from pdmesh.config import MeshConfig
    from pdmesh.model import OperationId


class Output(StrEnum):
    TABLE = "table"
    JSON = "json"


ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="TOML file; the environment and flags override it.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Set any setting of `pdmesh config show`; repeatable."),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="Directory, hub id, GGUF file, or a name such as smollm2. [default: the demo model]",
    ),
]
Scheduler = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="Use this scheduler instead of a mesh on this machine.")
]
Name = Annotated[str, typer.Option("--name", help="Name of the mesh on this machine.")]
OutputFormat = Annotated[
    Output, typer.Option("-o", "--output", help="Output format: table for people, json for scripts.")
]

Url = Annotated[str | None, typer.Option("--url", help="Use this gateway, such as http://host:8000.")]
ClientKey = Annotated[
    str | None,
    typer.Option("--api-key", envvar=CLIENT_KEY_VARIABLE, help="API key for the gateway; safer from the environment."),
]

# The pools of a mesh, real or simulated; `make_pools` has the defaults.
Prefill = Annotated[int | None, typer.Option("--prefill", min=0, help="Prefill instances. [default: 1]")]
Decode = Annotated[int | None, typer.Option("--decode", min=0, help="Decode instances. [default: 1]")]
Mixed = Annotated[int, typer.Option("--mixed", min=0, help="Instances that prefill and decode.")]

Dtype = Annotated[str | None, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]
CpuLevel = Annotated[str | None, typer.Option("--cpu-level", help="Highest level of CPU kernels to use, such as avx2.")]
Device = Annotated[str | None, typer.Option("--device", help="auto, cpu or cuda.")]
Dial = Annotated[str | None, typer.Option("--scheduler", metavar="HOST:PORT", help="Address of the scheduler.")]


SloTtft = Annotated[float | None, typer.Option(metavar="SECONDS", help="Target for the time to first token.")]
SloTpot = Annotated[float | None, typer.Option(metavar="SECONDS", help="Target for the time per output token.")]


def write_file(path: Path, content: bytes) -> None:
    """Write a file. Raises PdmeshError if that fails."""
    try:
        path.write_bytes(content)
    except OSError as error:
        raise PdmeshError(f"cannot write {path}: {error.strerror}") from error


def build_config(file: Path | None, settings: list[str] | None, **flags: object) -> MeshConfig:
    """Make the configuration: file < environment < ``--set`` < flags (``section__field``). Raises ConfigError."""
    from pdmesh.config_sources import load_config

    given: dict[str, object] = {}
    for setting in settings or []:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {setting!r}: must be NAME=VALUE, such as gateway.port=8001")
        given[name.strip()] = value.strip()
    named = {name.replace("__", "."): value for name, value in flags.items() if value is not None}
    return load_config(file, os.environ, given | named)


@dataclass(frozen=True, slots=True)
class Asked:
    """The mesh that a command asks, and the format of its output."""

    config: MeshConfig
    state: StateFolder
    output: Output


def new_operation_id() -> OperationId:
    """Return an id for an operation, which is done once however often it is asked for under that id."""
    from pdmesh.model import OperationId

    return OperationId(secrets.token_hex(4))


P = ParamSpec("P")


def asks_scheduler(command: Callable[Concatenate[Asked, P], None]) -> Callable[..., None]:
    """Decorate a command with the options for which mesh to ask and how to print; it gets an `Asked` first."""
    return _with_options(command, _asked)


def asks_quietly(command: Callable[Concatenate[Asked, P], None]) -> Callable[..., None]:
    """Decorate a command like `asks_scheduler`, without a choice of output."""
    return _with_options(command, _asked_quietly)


def _asked(
    name: Name = DEFAULT_NAME,
    scheduler: Scheduler = None,
    output: OutputFormat = Output.TABLE,
    config: ConfigFile = None,
    settings: Settings = None,
) -> Asked:
    tree = build_config(config, settings, scheduler_address=scheduler)
    return Asked(tree, state_folder(os.environ, name), output)


def _asked_quietly(
    name: Name = DEFAULT_NAME, scheduler: Scheduler = None, config: ConfigFile = None, settings: Settings = None
) -> Asked:
    return _asked(name, scheduler, Output.TABLE, config, settings)


def _with_options(command: Callable[..., None], shared: Callable[..., Asked]) -> Callable[..., None]:
    """``command`` as typer sees it: its own parameters but for the first, then those of ``shared``."""
    added = inspect.signature(shared, eval_str=True).parameters
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        asked = shared(**{name: given.pop(name) for name in added})
        command(asked, **given)

    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*own, *added.values())]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run
