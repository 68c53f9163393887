"""Commands made of functions: what their parameters' types and marks say becomes options, help and messages.

A command is a function in a `Commands` group. ``port: Annotated[int, Option(help="HTTP port.")] = 8000`` is the option
``--port``. What a user types is checked here, and a refusal names the flag as it was typed.
"""

from __future__ import annotations

import difflib
import enum
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from click.shell_completion import CompletionItem

from pdmesh.errors import ConfigError
from pdmesh.units import parse_seconds

#: Width of help where the terminal is wider.
MAX_HELP_WIDTH = 100

#: Of options that most commands have.
DEFAULT_PANEL = "Options"

#: In the order of help.
PANELS = (
    *("Arguments", "Model", "Workload", "Pools", "Instances", "Policy", "Targets", "Network", "Output"),
    DEFAULT_PANEL,
)

_WANTED = {int: "a whole number", float: "a number"}
_METAVARS = {int: "N", float: "NUMBER", str: "TEXT", Path: "PATH"}


class Option:
    """Mark of a parameter that is an option."""

    def __init__(
        self,
        *names: str,
        help: str = "",
        metavar: str | None = None,
        min: float | None = None,
        max: float | None = None,
        envvar: str | None = None,
        panel: str = DEFAULT_PANEL,
        seconds: bool = False,
    ) -> None:
        """``names`` follow from the parameter unless given; ``seconds``: a duration, which may have a unit."""
        self.names = names
        self.help = help
        self.metavar = metavar
        self.limits = (min, max)
        self.envvar = envvar
        self.panel = panel
        self.seconds = seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """Mark of a parameter that is given by its place."""

    metavar: str = ""
    help: str = ""


@dataclass(frozen=True, slots=True)
class Flag:
    """An option that gives a setting its value; the setting's own type checks that."""

    name: str
    setting: str  # dotted name
    help: str
    metavar: str = "TEXT"
    short: str = ""
    panel: str = DEFAULT_PANEL
    is_switch: bool = False

    @property
    def key(self) -> str:
        """Name under which a command gets the value."""
        return f"flag_{self.setting.replace('.', '_')}"


#: What a command takes.
Taken = inspect.Parameter | Flag


class Commands(click.Group):
    """A group of commands. A command is built when it is called."""

    def __init__(self, name: str, help: str, *, default: str = "", params: Sequence[click.Parameter] = ()) -> None:
        """``default``: the command that runs if none is named."""
        settings = {"help_option_names": ["-h", "--help"], "max_content_width": MAX_HELP_WIDTH}
        super().__init__(name=name, help=help, params=list(params), context_settings=settings)
        self.default = default
        self._defined: dict[str, _Definition] = {}
        self._names: dict[str, str] = {}  # names of commands, by name and alias

    def define(
        self, name: str = "", *, example: str, aliases: Sequence[str] = ()
    ) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Decorate a function that is a command, called like the function unless ``name`` is given."""

        def register(function: Callable[..., None]) -> Callable[..., None]:
            self._add(name or function.__name__, _Definition(function, aliases, example))
            return function

        return register

    def _add(self, name: str, definition: _Definition) -> None:
        self._defined[name] = definition
        self._names |= dict.fromkeys((name, *definition.aliases), name)

    def include(self, others: Commands) -> None:
        """Take over the commands of another group."""
        for name, definition in others._defined.items():
            self._add(name, definition)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, without aliases."""
        return [*self._defined, *self.commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command that a name or an alias means."""
        name = self._names.get(cmd_name)
        return self.commands.get(cmd_name) if name is None else _Command(name, self._defined[name])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Print the help, or run the default command, if none is named."""
        is_named = bool(args) and (not args[0].startswith("-") or args[0] in ctx.help_option_names)
        if self.default and not is_named:
            args = [self.default, *args]
        if not args and not ctx.resilient_parsing:
            click.echo(ctx.get_help())
            ctx.exit()
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the named command, or suggest a similar name."""
        name = args[0]
        if self.get_command(ctx, name) is None and not ctx.resilient_parsing and not name.startswith("-"):
            close = difflib.get_close_matches(name, [*self._names, *self.commands], n=1)
            hint = f"did you mean {close[0]}?" if close else f"`{ctx.command_path} --help` lists all commands"
            raise click.UsageError(f"no command is called {name!r}: {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands with their aliases and the first paragraph of their help."""
        rows = [(", ".join((name, *each.aliases)), each.summary) for name, each in self._defined.items()]
        rows += [(name, group.help or "") for name, group in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class _Definition(NamedTuple):
    function: Callable[..., None]
    aliases: Sequence[str]
    example: str

    @property
    def summary(self) -> str:
        return " ".join(inspect.cleandoc(self.function.__doc__ or "").partition("\n\n")[0].split())


class _Command(click.Command):
    """A command whose help shows its options in panels."""

    def __init__(self, name: str, definition: _Definition) -> None:
        taken = [*taken_by(definition.function)]
        text = inspect.cleandoc(definition.function.__doc__ or "")
        if definition.aliases:
            text += f"\n\nAlso called {', '.join(definition.aliases)}."
        super().__init__(
            name,
            callback=definition.function,
            params=[_flag(each) if isinstance(each, Flag) else _parameter(each) for each in taken],
            help=text,
            epilog=f"Example: {definition.example}",
        )
        self._panels = {
            each.key if isinstance(each, Flag) else each.name: getattr(_mark(each), "panel", "Arguments")
            for each in taken
        }

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a panel for the arguments and for each group of options."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                panels.setdefault(self._panels.get(str(param.name), DEFAULT_PANEL), []).append(record)
        for title in sorted(panels, key=PANELS.index):
            with formatter.section(title):
                formatter.write_dl(panels[title])


class _Argument(click.Argument):
    """An argument with a help of its own."""

    def __init__(self, name: str, mark: Argument, **more: Any) -> None:
        shown = mark.metavar or name.upper()
        dots = "..." if more.get("nargs") == -1 else ""
        metavar = f"{shown}{dots}" if more["required"] else f"[{shown}]{dots}"
        super().__init__([name], metavar=metavar, **more)
        self.shown, self.told = shown, mark.help

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        """Return the row of the argument."""
        return self.shown, self.told


if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
else:
    _ParamType = click.ParamType  # no generic before click 8.5


class _Value(_ParamType):
    """Type of a parameter's value, with messages that name the option."""

    def __init__(
        self,
        parse: Callable[[str], Any],
        metavar: str,
        wanted: str = "",
        choices: Sequence[str] = (),
        limits: tuple[float | None, float | None] = (None, None),
    ) -> None:
        self.name = metavar
        self._parse, self._choices = parse, choices
        self._low, self._high = limits
        self._wanted = wanted
        if self._high is not None:
            self._wanted += f" from {self._low or 0:g} to {self._high:g}"
        elif self._low is not None:
            self._wanted += f" of at least {self._low:g}"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return self.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the value. Raises ConfigError, which names the option as it is typed."""
        if not isinstance(value, str):
            return value  # a default
        try:
            parsed = self._parse(value)
        except ValueError as error:
            raise self._refusal(value, param) from error
        if (self._low is not None and not parsed >= self._low) or (self._high is not None and not parsed <= self._high):
            raise self._refusal(value, param)
        return parsed

    def _refusal(self, value: str, param: click.Parameter | None) -> ConfigError:
        name = param.shown if isinstance(param, _Argument) else "" if param is None else max(param.opts, key=len)
        return ConfigError(f"{name} is {value!r}: must be {self._wanted}")

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the choices, or let the shell complete a path."""
        if self._parse is Path:
            return [CompletionItem(incomplete, type="file")]
        return [CompletionItem(each) for each in self._choices if each.startswith(incomplete)]


def taken_by(function: Callable[..., None]) -> Iterable[Taken]:
    """Return what a command takes: its function's parameters, or what its decorator says instead."""
    takes: Callable[[], Iterable[Taken]] | None = getattr(function, "takes", None)
    return parameters_of(function) if takes is None else takes()


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function, with types as annotations."""
    return list(inspect.signature(function, eval_str=True).parameters.values())


def with_first(
    command: Callable[..., None], make: Callable[..., Any], more: Callable[[], Iterable[Taken]]
) -> Callable[..., None]:
    """Return ``command`` without its first parameter, which ``make`` makes of what ``more`` takes."""

    @functools.wraps(command)
    def run(**given: Any) -> None:
        names = [each.key if isinstance(each, Flag) else each.name for each in more()]
        first = make(**{name: given.pop(name) for name in names})
        command(first, **given)

    run.takes = lambda: [*parameters_of(command)[1:], *more()]  # type: ignore[attr-defined]
    return run


def _mark(parameter: Taken) -> Option | Argument | Flag:
    if isinstance(parameter, Flag):
        return parameter
    marks = getattr(parameter.annotation, "__metadata__", ())
    return next((mark for mark in marks if isinstance(mark, Option | Argument)), Option())


def _flag(flag: Flag) -> click.Option:
    names = [flag.key, flag.name, *([flag.short] if flag.short else [])]
    if flag.is_switch:
        return click.Option(names, is_flag=True, default=None, help=flag.help)
    return click.Option(names, metavar=flag.metavar, help=flag.help)


def _parameter(parameter: inspect.Parameter) -> click.Parameter:
    mark, hint = _mark(parameter), parameter.annotation
    hint = hint.__origin__ if hasattr(hint, "__metadata__") else hint
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(part for part in typing.get_args(hint) if part is not types.NoneType)
    is_list = typing.get_origin(hint) is list
    kind = typing.get_args(hint)[0] if is_list else hint
    required = parameter.default is inspect.Parameter.empty
    more: dict[str, Any] = {} if required or parameter.default is None else {"default": parameter.default}
    if isinstance(mark, Argument):
        nargs = -1 if is_list else 1
        return _Argument(parameter.name, mark, type=_type(kind, Option()), required=required, nargs=nargs, **more)
    assert isinstance(mark, Option)
    names = [parameter.name, *(mark.names or (f"--{parameter.name.replace('_', '-')}",))]
    if kind is bool:
        return click.Option(names, is_flag=True, help=mark.help, **more)
    text = f"{mark.help} [default: {parameter.default:g}s]" if mark.seconds and more else mark.help
    return click.Option(
        names,
        type=_type(kind, mark),
        multiple=is_list,
        metavar=mark.metavar,
        help=text,
        envvar=mark.envvar,
        show_envvar=mark.envvar is not None,
        show_default=bool(more) and not mark.seconds,
        **more,
    )


def _type(kind: Any, mark: Option) -> _Value:
    if mark.seconds:
        return _Value(parse_seconds, "DURATION", "a duration such as 30s or 5m", limits=mark.limits)
    if typing.get_origin(kind) is typing.Literal:
        return _choice({text: text for text in typing.get_args(kind)})
    if issubclass(kind, enum.Enum):
        return _choice({str(each.value): each for each in kind})
    return _Value(kind, _METAVARS[kind], _WANTED.get(kind, ""), limits=mark.limits)


def _choice(values: Mapping[str, Any]) -> _Value:
    def parse(text: str) -> Any:
        if text not in values:
            raise ValueError(text)
        return values[text]

    return _Value(parse, f"[{'|'.join(values)}]", f"one of {', '.join(values)}", tuple(values))
