"""Options that several commands share, and the configuration that they make."""

from __future__ import annotations

import inspect
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Concatenate, ParamSpec, TypeVar

from typer import Option

from pdmesh.cli.command_group import parameters_of, with_first
from pdmesh.cli.state_folder import DEFAULT_NAME, StateFolder, scheduler_of, state_folder
from pdmesh.errors import ConfigError, ProtocolError

if TYPE_CHECKING:  # ``--help`` needs no configuration
    from pdmesh.config import MeshConfig
    from pdmesh.operations import OperationId
    from pdmesh.wire.messages import AdminRequest


class Output(StrEnum):
    TABLE = "table"
    JSON = "json"


ConfigFile = Annotated[
    Path | None, Option("--config", metavar="FILE", help="TOML file; the environment and flags override it.")
]
Settings = Annotated[
    list[str] | None,
    Option("--set", metavar="NAME=VALUE", help="Set any setting of `pdmesh config show`; repeatable."),
]
Scheduler = Annotated[
    str | None, Option(metavar="HOST:PORT", help="Use this scheduler instead of a mesh on this machine.")
]
Name = Annotated[str, Option("--name", metavar="NAME", help="Name of the mesh on this machine.")]
OutputFormat = Annotated[Output, Option("-o", "--output", help="Output format: table for people, json for scripts.")]

# The pools of a mesh, real or simulated; `make_pools` has the defaults.
Prefill = Annotated[
    int | None, Option("--prefill", min=0, rich_help_panel="Pools", help="Prefill instances. [default: 1]")
]
Decode = Annotated[
    int | None, Option("--decode", min=0, rich_help_panel="Pools", help="Decode instances. [default: 1]")
]
Mixed = Annotated[int, Option("--mixed", min=0, rich_help_panel="Pools", help="Instances that prefill and decode.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Options of a conversation."""

    model: Annotated[str | None, Option(help="Name of the served model. [default: the first one]")] = None
    system: Annotated[str | None, Option(help="A system message.")] = None
    max_tokens: Annotated[int, Option(min=1, help="Most tokens of an answer.")] = 512
    temperature: Annotated[float | None, Option(min=0, help="0: the likeliest tokens. [default: the model's]")] = None
    tools: Annotated[Path | None, Option(help="JSON file with a list of tools that the model may call.")] = None
    tool_choice: Annotated[str | None, Option(help="auto, none, required, or the name of a tool. [default: auto]")] = (
        None
    )


@dataclass(frozen=True, slots=True)
class Flag:
    """Option that gives a setting its value, which the setting's own type checks. `setting` is a dotted name."""

    name: str
    setting: str
    help: str
    metavar: str | None = None
    short: str = ""
    panel: str = "Options"
    is_switch: bool = False

    @property
    def parameter(self) -> inspect.Parameter:
        """Parameter through which a command gets the value."""
        names = [self.name, *([self.short] if self.short else [])]
        option = Option(*names, metavar=self.metavar, help=self.help, rich_help_panel=self.panel)
        hint = Annotated[bool | None, option] if self.is_switch else Annotated[str | None, option]
        name = f"flag_{self.setting.replace('.', '_')}"
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)


MODEL = Flag(
    "--model",
    "model",
    "Directory, hub id, GGUF file, or a name such as smollm2. [default: the demo model]",
    metavar="MODEL",
    panel="Model",
)
DTYPE = Flag("--dtype", "worker.dtype", "auto, float32, bfloat16 or float16.", panel="Model")
DEVICE = Flag("--device", "worker.device", "auto, cpu or cuda.", panel="Model")
DIAL = Flag("--scheduler", "scheduler_address", "Address of the scheduler.", metavar="HOST:PORT")
HOST = Flag(
    "--host",
    "gateway.host",
    "Address that the gateway listens on. [default: 127.0.0.1]",
    metavar="ADDRESS",
    panel="Network",
)
PORT = Flag("--port", "gateway.port", "HTTP port; 0 takes a free one. [default: 8000]", metavar="PORT", panel="Network")


@dataclass(frozen=True, slots=True)
class Given:
    """Configuration from a command's options: file < environment < ``--set`` < flags.

    `flags` has the flag and its value for each setting.
    """

    file: Path | None
    settings: Sequence[str]
    flags: Mapping[str, tuple[str, object]]

    def flag(self, setting: str) -> object:
        """Return the value of a setting's flag; None if the flag was not typed."""
        return self.flags.get(setting, ("", None))[1]

    def config(self, **values: object) -> MeshConfig:
        """Build the configuration. Raise ConfigError for an invalid setting.

        ``values`` of top-level settings override all sources, except values of None.
        """
        from pdmesh.config_sources import load_config

        told: dict[str, object] = {}
        for setting in self.settings:
            name, equals, value = setting.partition("=")
            if not equals:
                raise ConfigError(f"--set {setting!r}: must be NAME=VALUE, such as gateway.port=8001")
            told[name.strip()] = value.strip()
        told |= {setting: value for setting, (_, value) in self.flags.items()}
        told |= {name: value for name, value in values.items() if value is not None}
        return load_config(self.file, os.environ, told, {setting: flag for setting, (flag, _) in self.flags.items()})


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Asked:
    """The mesh that a command asks, and the format of its output."""

    config: MeshConfig
    state: StateFolder
    output: Output

    async def ask(self, question: AdminRequest, *kinds: type[T]) -> T:
        """Return the scheduler's answer, which is one of ``kinds``.

        Raises InstanceUnavailable if no scheduler answers, and PdmeshError if no mesh runs or the scheduler refuses.
        """
        from pdmesh.wire.admin import ask_scheduler

        _, address, security = scheduler_of(self.config, self.state)
        answer = await ask_scheduler(address, security, question)
        if not isinstance(answer, kinds):
            raise ProtocolError(f"the scheduler at {address} sent an unexpected answer")
        return answer

    def answer(self, question: AdminRequest, *kinds: type[T]) -> T:
        """Return `ask`'s answer, without an event loop."""
        import anyio

        return anyio.run(lambda: self.ask(question, *kinds))


def new_operation_id() -> OperationId:
    """Return an id for an operation. Repeated requests with one id start the operation once."""
    from pdmesh.operations import OperationId

    return OperationId(secrets.token_hex(4))


P = ParamSpec("P")


def configured(*flags: Flag) -> Callable[[Callable[Concatenate[Given, P], None]], Callable[..., None]]:
    """Decorate a command with the options for a configuration, including ``flags``; its first argument is a `Given`."""

    def make(config: ConfigFile = None, settings: Settings = None, **typed: object) -> Given:
        in_order = zip(flags, typed.values(), strict=True)
        values = {flag.setting: (flag.name, value) for flag, value in in_order if value is not None}
        return Given(config, settings or (), values)

    more = [*(flag.parameter for flag in flags), *parameters_of(make)[:2]]
    return lambda command: with_first(command, make, more)


def asks_scheduler(command: Callable[Concatenate[Asked, P], None]) -> Callable[..., None]:
    """Decorate a command with the options for the mesh and the output; its first argument is an `Asked`."""
    return with_first(command, _asked, parameters_of(_asked))


def asks_quietly(command: Callable[Concatenate[Asked, P], None]) -> Callable[..., None]:
    """Decorate a command like `asks_scheduler`, without a choice of output."""
    return with_first(command, _asked, [param for param in parameters_of(_asked) if param.name != "output"])


def _asked(
    name: Name = DEFAULT_NAME,
    scheduler: Scheduler = None,
    output: OutputFormat = Output.TABLE,
    config: ConfigFile = None,
    settings: Settings = None,
) -> Asked:
    tree = Given(config, settings or (), {}).config(scheduler_address=scheduler)
    return Asked(tree, state_folder(os.environ, name), output)
