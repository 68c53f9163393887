"""``pdmesh keys``: API keys for `security.api_keys_file`, operators' tokens for `security.operators_file`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Exit, Option

from pdmesh.apikeys import (
    DEFAULT_OPERATOR_SCOPES,
    DEFAULT_SCOPES,
    OPERATOR_SCOPES,
    SCOPES,
    ApiKey,
    Operator,
    entry_of,
    hash_key,
    new_key,
    parse_api_keys,
    parse_operators,
)
from pdmesh.cli.command_group import Commands
from pdmesh.errors import ConfigError

app = Commands("keys", "Create API keys and operator tokens.")


@app.command(example="pdmesh keys new alice --file keys.toml")
def new(
    name: Annotated[str, Argument(help="Owner of the key; it appears in logs and limits.")],
    file: Annotated[Path | None, Option(help="Add the entry to this file (security.api_keys_file).")] = None,
    scope: Annotated[
        list[str] | None, Option(help=f"{', '.join(sorted(SCOPES))}; repeatable. [default: all but watch]")
    ] = None,
    requests_per_minute: Annotated[float | None, Option()] = None,
    tokens_per_minute: Annotated[float | None, Option(help="Prompt and output tokens per minute.")] = None,
    max_concurrent_requests: Annotated[float | None, Option()] = None,
    min_priority: Annotated[int | None, Option(help="Lowest value allowed; lower values are served first.")] = None,
    max_priority: Annotated[int | None, Option()] = None,
    min_slo_ttft_ms: Annotated[float | None, Option(help="Shortest TTFT target that the key may ask for.")] = None,
    share: Annotated[int, Option(help="Weight among keys whose requests wait.")] = 1,
) -> None:
    """Create a key and its entry. The key is printed once and stored nowhere."""
    secret = new_key()
    key = ApiKey(
        name=name,
        hash=hash_key(secret),
        scopes=frozenset(scope) if scope else DEFAULT_SCOPES,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        max_concurrent_requests=max_concurrent_requests,
        min_priority=min_priority,
        max_priority=max_priority,
        min_slo_ttft_ms=min_slo_ttft_ms,
        share=share,
    )
    _make(key, secret, file, "security.api_keys_file", "a running gateway")


@app.command(example="pdmesh keys operator bob --scope write --file operators.toml")
def operator(
    name: Annotated[str, Argument(help="Owner of the token; it appears in the scheduler's log.")],
    file: Annotated[Path | None, Option(help="Add the entry to this file (security.operators_file).")] = None,
    scope: Annotated[
        list[str] | None, Option(help=f"{', '.join(sorted(OPERATOR_SCOPES))}; repeatable. [default: read]")
    ] = None,
) -> None:
    """Create an operator's token and its entry. The operator sets security.operator_token; it is printed once."""
    secret = new_key()
    scopes = frozenset(scope) if scope else DEFAULT_OPERATOR_SCOPES
    made = Operator(name=name, hash=hash_key(secret), scopes=scopes)
    _make(made, secret, file, "security.operators_file", "a running scheduler")


def _make(key: ApiKey | Operator, secret: str, file: Path | None, setting: str, reader: str) -> None:
    """Add the entry to ``file``, or print it, and print the secret. Exit with 2 if that fails."""
    try:
        entry = entry_of(key)
        if _parse(key, entry, "the entry") != {key.name: key}:
            raise ConfigError("the entry is not valid")
        if file is not None:
            add_entry(file, key, entry)
    except ConfigError as error:
        typer.echo(f"pdmesh: {error}", err=True)
        raise Exit(2) from error
    if file is None:
        typer.echo(f"# append to the file that {setting} names (*.toml)\n{entry}", err=True)
    else:
        typer.echo(f"pdmesh: {key.name} added to {file}; {reader} reads it within seconds", err=True)
    typer.echo(secret)


def _parse(key: ApiKey | Operator, text: str, where: str) -> Mapping[str, ApiKey | Operator]:
    return parse_operators(text, where) if isinstance(key, Operator) else parse_api_keys(text, where)


def add_entry(file: Path, key: ApiKey | Operator, entry: str) -> None:
    """Append an entry to a file that only its owner can read.

    Raise ConfigError if the name is in use, or the file is no ``.toml`` or cannot be written.
    """
    if file.suffix != ".toml":
        raise ConfigError(f"{file}: the name of the file must end in .toml")
    try:
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        if text and key.name in _parse(key, text, str(file)):
            raise ConfigError(f"{file} has an entry {key.name}: remove it first")
        whole = f"{text.rstrip()}\n\n{entry}".lstrip()
        _parse(key, whole, str(file))
        beside = file.with_name(f".{file.name}.new")
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as out:
            out.write(whole)
        beside.replace(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write {file}: {error}") from error
