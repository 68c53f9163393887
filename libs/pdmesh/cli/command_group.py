"""Typer apps whose commands are built when called, with options in panels, and errors that name the flag."""

from __future__ import annotations

import difflib
import functools
import inspect
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, ParamSpec, TypeVar

import typer
from typer._coercion import RuntimeParam
from typer._param_types import choice_as_str
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption
from typer.main import get_command_from_info
from typer.models import CommandInfo

from pdmesh.errors import ConfigError
from pdmesh.units import parse_seconds

if TYPE_CHECKING:
    from typer._click import Command as AnyCommand
    from typer._click import Context, HelpFormatter, Parameter

#: Largest width of help.
MAX_HELP_WIDTH = 100

#: Panels in the order of help. Options without a panel are in the last one.
PANELS = (
    *("Arguments", "Model", "Workload", "Pools", "Instances", "Policy", "Targets", "Network", "Output"),
    "Options",
)

#: Other tools' names for our commands.
OTHER_WORDS = {"pull": "up", "start": "up", "kill": "down", "rm": "down", "bench": "profile", "benchmark": "profile"}

#: Entry points with which other distributions add commands. The name is a group's, and the value a `Commands`.
ENTRY_POINTS = "pdmesh.commands"

#: Commands of other distributions, with the extra that installs each.
EXTRAS = dict.fromkeys(("simulate", "plan", "replay", "advise"), "lab")

_WANTED = {int: "a whole number", float: "a number", parse_seconds: "a duration such as 30s or 5m"}
_METAVARS = {int: "N", float: "NUMBER", str: "TEXT", Path: "PATH", parse_seconds: "DURATION"}

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
P = ParamSpec("P")


class Commands(typer.Typer):
    """A group of commands. A command is built when it is called."""

    def __init__(self, name: str, help: str = "", *, default: str = "") -> None:
        """``default`` is the command that runs if none is named."""
        super().__init__(
            name=name,
            help=help,
            cls=type("Group", (_Group,), {"app": self}),
            context_settings={"help_option_names": ["-h", "--help"], "max_content_width": MAX_HELP_WIDTH},
            rich_markup_mode=None,
            pretty_exceptions_enable=False,
        )
        self.default = default
        self.infos: dict[str, CommandInfo] = {}  # each alias has an entry, too

    @functools.cached_property
    def all_infos(self) -> dict[str, CommandInfo]:
        """Commands of this group, with commands that installed distributions add. Reading entry points takes time."""
        from importlib.metadata import entry_points

        added = [each.load() for each in entry_points(group=ENTRY_POINTS, name=str(self.info.name))]
        return {name: info for commands in (self, *added) for name, info in commands.infos.items()}

    def command(self, name: str | None = None, *, example: str = "", **settings: Any) -> Callable[[F], F]:
        """Register a command. ``name`` may have aliases behind it: ``"up, serve"``."""

        def register(function: F) -> F:
            names = name or function.__name__
            own, _, aliases = names.partition(", ")
            text = inspect.getdoc(function) or ""
            info = CommandInfo(
                names,
                cls=_Command,
                callback=function,
                help=f"{text}\n\nAlso called {aliases}." if aliases else text,
                short_help=" ".join(text.partition("\n\n")[0].split()),
                epilog=f"Example: {example}",
                **settings,
            )
            self.infos |= dict.fromkeys((own, *filter(None, aliases.split(", "))), info)
            return function

        return register


class _Command(TyperCommand):
    def get_params(self, ctx: Context) -> list[Parameter]:
        return _prepared(super().get_params(ctx))

    def format_options(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Write a panel for the arguments and for each group of options."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            name, text = param.get_help_record(ctx) or ("", "")
            if isinstance(param, TyperArgument):
                panels.setdefault("Arguments", []).append((str(param.metavar), text))
            elif isinstance(param, TyperOption):
                panels.setdefault(param.rich_help_panel or "Options", []).append((name, text))
        for title in sorted(panels, key=PANELS.index):
            with formatter.section(title):
                formatter.write_dl(panels[title])


class _Group(TyperGroup):
    app: ClassVar[Commands]

    def get_params(self, ctx: Context) -> list[Parameter]:
        return _prepared(super().get_params(ctx))

    def list_commands(self, ctx: Context) -> list[str]:
        """Return the names of all commands, without aliases."""
        names = (str(info.name).partition(", ")[0] for info in self.app.all_infos.values())
        return [*dict.fromkeys(names), *self.commands]

    def get_command(self, ctx: Context, cmd_name: str) -> AnyCommand | None:
        """Build the command for a name or an alias; return None if there is none."""
        info = self.app.infos.get(cmd_name)
        if info is None and cmd_name not in self.commands:
            info = self.app.all_infos.get(cmd_name)
        if info is None:
            return super().get_command(ctx, cmd_name)
        return get_command_from_info(info, pretty_exceptions_short=False, rich_markup_mode=None)

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Print the help, or run the default command, if none is named."""
        is_named = bool(args) and (not args[0].startswith("-") or args[0] in ctx.help_option_names)
        if self.app.default and not is_named:
            args = [self.app.default, *args]
        return super().parse_args(ctx, args or ["--help"])

    def resolve_command(self, ctx: Context, args: list[str]) -> tuple[str | None, AnyCommand | None, list[str]]:
        """Return the named command. Exit with an error for an unknown name, and suggest a similar one."""
        name = args[0]
        if self.get_command(ctx, name) is None and not ctx.resilient_parsing and not name.startswith("-"):
            if name in EXTRAS:
                ctx.fail(f"`{ctx.command_path} {name}` is not installed: run `pip install 'pdmesh[{EXTRAS[name]}]'`")
            known = [*self.app.all_infos, *self.commands]
            meant = next(iter(difflib.get_close_matches(name, known, n=1)), OTHER_WORDS.get(name))
            hint = f": did you mean {meant}?" if meant in known else ""
            ctx.fail(f"no command is called {name!r}{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Write the list of commands with their aliases and the first paragraph of their help."""
        rows = [(str(info.name), info.short_help or "") for info in dict.fromkeys(self.app.all_infos.values())]
        rows += [(name, group.help or "") for name, group in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class _Reader(RuntimeParam):
    """Reader of a parameter's values. Typer's own would import pydantic, which takes 0.13 s of CPU time."""

    def _coerce_value(self, value: Any, param: Any, ctx: Context) -> Any:
        return (
            [self._read(each, param) for each in value] if param.type_descriptor.is_list else self._read(value, param)
        )

    def _read(self, value: Any, param: TyperArgument | TyperOption) -> Any:
        """Return the parsed value. Raises ConfigError, which names the option as it is typed."""
        if not isinstance(value, str):
            return value  # a default, or a switch
        choices = {choice_as_str(each): each for each in param.type_descriptor.choices or ()}
        parse = choices.__getitem__ if choices else _kind(param)
        low, high = self.parameter_info.min, self.parameter_info.max
        try:
            read = parse(value)
            if (low is None or read >= low) and (high is None or read <= high):
                return read
        except (KeyError, ValueError):
            pass
        wanted = f"one of {', '.join(choices)}" if choices else _WANTED[parse]
        if high is not None:
            wanted += f" from {low or 0:g} to {high:g}"
        elif low is not None:
            wanted += f" of at least {low:g}"
        name = param.metavar if isinstance(param, TyperArgument) else max(param.opts, key=len)
        raise ConfigError(f"{name} is {value!r}: must be {wanted}")


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function, with types as annotations."""
    return list(inspect.signature(function, eval_str=True).parameters.values())


def with_first(
    command: Callable[..., None], make: Callable[..., Any], more: Sequence[inspect.Parameter]
) -> Callable[..., None]:
    """Return ``command`` without its first parameter; ``make`` makes that argument from the parameters ``more``."""
    first, *rest = parameters_of(command)

    @functools.wraps(command)
    def run(**given: Any) -> None:
        made = make(**{param.name: given.pop(param.name) for param in more})
        command(**{first.name: made}, **given)

    taken = [*rest, *more]
    by_name = [param.replace(kind=inspect.Parameter.KEYWORD_ONLY) for param in taken]
    run.__signature__ = inspect.Signature(by_name)  # type: ignore[attr-defined]
    return run


def takes(kind: Callable[..., T]) -> Callable[[Callable[Concatenate[T, P], None]], Callable[..., None]]:
    """Decorate a command with an option for each field of the dataclass ``kind``, its first argument."""
    return lambda command: with_first(command, kind, parameters_of(kind))


def _kind(param: TyperArgument | TyperOption) -> Callable[[str], Any]:
    described = param.type_descriptor
    item = typing.get_args(described.annotation)[0] if described.is_list else described.annotation
    return described.parameter_info.parser or item


def _prepared(params: list[Parameter]) -> list[Parameter]:
    """Set each parameter's reader, and its names in help."""
    for param in params:
        assert isinstance(param, TyperArgument | TyperOption)
        if param._runtime_param is None:
            described, kind = param.type_descriptor, _kind(param)
            param._runtime_param = _Reader(described.parameter_info, described.annotation)
            param.min = param.max = None  # errors name the limits
            if isinstance(param, TyperArgument):
                param.metavar = param.metavar or param.name.upper()
            elif not described.is_choice:
                param.metavar = param.metavar or _METAVARS.get(kind)
            if kind is parse_seconds and param.default is not None:
                param.help, param.show_default = f"{param.help} [default: {param.default:g}s]", False
    return params
