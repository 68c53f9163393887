"""API keys in a file: names, hashes, and the limits of each.

::

    [keys.alice]
    hash = "sha256:…"                # of the key, which is written nowhere; `pdmesh keys new` makes both
    scopes = ["generate"]            # of generate, tokenize, models, watch; all but watch if not given
    requests_per_minute = 600
    tokens_per_minute = 200_000      # prompt and output tokens
    max_concurrent_requests = 32     # choices count
    min_priority = 0                 # lower is earlier
    max_priority = 10
    min_slo_ttft_ms = 200            # the shortest target it may ask for
    share = 2                        # while several wait: twice the tokens of a key whose share is 1, the default

A missing field sets no limit. Operators, who look at a running mesh and change it, have tokens of their own in a file
of their own::

    [operators.bob]
    hash = "sha256:…"                # of the token; `pdmesh keys operator` makes both
    scopes = ["read", "write"]       # read alone if not given
"""

from __future__ import annotations

import hashlib
import re
import secrets
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from pdmesh.errors import ConfigError

SCOPES = frozenset({"generate", "tokenize", "models", "watch"})

#: Scopes of a key whose entry names none. With `watch` a client sees other clients' names for their requests.
DEFAULT_SCOPES = SCOPES - {"watch"}

#: Scopes of an operator: ``read`` for questions, ``write`` for changes as well.
OPERATOR_SCOPES = frozenset({"read", "write"})
DEFAULT_OPERATOR_SCOPES = frozenset({"read"})

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_COUNTS = ("requests_per_minute", "tokens_per_minute", "max_concurrent_requests")
_PRIORITIES = ("min_priority", "max_priority")

#: Largest share, so that no key gets everything.
MAX_SHARE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """Entry of a key. None means no limit.

    `hash` is "sha256:" and hexadecimal digits. `share` is the weight among the keys whose requests wait.
    """

    name: str
    hash: str
    scopes: frozenset[str] = DEFAULT_SCOPES
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    max_concurrent_requests: float | None = None
    min_priority: int | None = None
    max_priority: int | None = None
    min_slo_ttft_ms: float | None = None
    share: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """Entry of an operator. `hash` is the token's, in the form of a key's."""

    name: str
    hash: str
    scopes: frozenset[str] = DEFAULT_OPERATOR_SCOPES

    @property
    def may_read(self) -> bool:
        return bool(self.scopes)  # operators with write access may read, too

    @property
    def may_write(self) -> bool:
        return "write" in self.scopes


def new_key() -> str:
    """Return a new key with 256 random bits."""
    return f"sk-pdmesh-{secrets.token_urlsafe(32)}"


def hash_key(key: str) -> str:
    """Return the hash of a key, for a file. A quick hash is enough, because keys are long and random."""
    return "sha256:" + hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def parse_api_keys(text: str, where: str) -> dict[str, ApiKey]:
    """Return the entries by name in the TOML text of ``where``; there may be none.

    Raises ConfigError that names the fault.
    """
    entries = _tables(text, "keys", where)
    keys = {name: _api_key(name, entry, f"[keys.{name}] in {where}") for name, entry in entries.items()}
    _check_distinct(keys.values(), "key", where)
    return keys


def parse_operators(text: str, where: str) -> dict[str, Operator]:
    """Return the operators by name in the TOML text of ``where``, as `parse_api_keys` does."""
    entries = _tables(text, "operators", where)
    operators = {name: _operator(name, entry, f"[operators.{name}] in {where}") for name, entry in entries.items()}
    _check_distinct(operators.values(), "token", where)
    return operators


def _tables(text: str, what: str, where: str) -> dict[str, Any]:
    try:
        tree = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{where} is not valid TOML: {error}") from error
    entries = tree.pop(what, {})
    if tree or not isinstance(entries, dict):
        raise ConfigError(f"{where} holds {', '.join(tree) or what}: it may hold tables [{what}.NAME] only")
    return entries


def _check_distinct(entries: Iterable[ApiKey | Operator], what: str, where: str) -> None:
    by_hash: dict[str, str] = {}
    for entry in entries:
        if (other := by_hash.setdefault(entry.hash, entry.name)) != entry.name:
            raise ConfigError(f"{where}: {other} and {entry.name} are the same {what}")


def _operator(name: str, entry: Any, where: str) -> Operator:
    _check_entry(name, entry, ("hash", "scopes"), OPERATOR_SCOPES, where)
    if "hash" not in entry:
        raise ConfigError(f"{where} has no hash: `pdmesh keys operator {name}` makes a token and its entry")
    return Operator(name=name, hash=entry["hash"], scopes=frozenset(entry.get("scopes", DEFAULT_OPERATOR_SCOPES)))


def _check_entry(name: str, entry: Any, known: Sequence[str], scopes: frozenset[str], where: str) -> None:
    if not _NAME.fullmatch(name) or not isinstance(entry, dict):
        raise ConfigError(f"{where}: an entry must be a table whose name has 1 to 64 characters of A-Z a-z 0-9 _ -")
    for field, value in entry.items():
        if field not in known:
            raise ConfigError(f"{where}: unknown setting {field}; there are {', '.join(known)}")
        if problem := _problem(field, value, scopes):
            given = "" if field == "hash" else f", not {value!r}"  # a value may be the secret itself
            raise ConfigError(f"{where}: {field} {problem}{given}")


def _api_key(name: str, entry: Any, where: str) -> ApiKey:
    _check_entry(name, entry, [item.name for item in fields(ApiKey) if item.name != "name"], SCOPES, where)
    if "hash" not in entry:
        raise ConfigError(f"{where} has no hash: `pdmesh keys new {name}` makes a key and its entry")
    values = {**entry, "scopes": frozenset(entry.get("scopes", DEFAULT_SCOPES))}
    key = ApiKey(name=name, **values)
    if key.min_priority is not None and key.max_priority is not None and key.min_priority > key.max_priority:
        raise ConfigError(f"{where}: min_priority is above max_priority")
    return key


def _problem(field: str, value: Any, scopes: frozenset[str]) -> str | None:
    """Return what the value of a field must be; None if it is valid."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if field == "hash":
        is_hash = isinstance(value, str) and _HASH.fullmatch(value) is not None
        return None if is_hash else "must be sha256: and 64 hexadecimal digits"
    if field == "scopes":
        known = isinstance(value, list) and all(isinstance(scope, str) and scope in scopes for scope in value)
        return None if known else f"must be a list of {', '.join(sorted(scopes))}"
    if field == "share":
        whole = isinstance(value, int) and is_number and 1 <= value <= MAX_SHARE
        return None if whole else f"must be a whole number from 1 to {MAX_SHARE}"
    if field in _PRIORITIES:
        whole = isinstance(value, int) and is_number and abs(value) < 2**31
        return None if whole else "must be a whole number below 2**31"
    if field in _COUNTS:
        return None if is_number and 1 <= value < 1e15 else "must be a number of at least 1"
    return None if is_number and 0 < value < 1e9 else "must be a number above 0"


def entry_of(key: ApiKey | Operator) -> str:
    """Return an entry as TOML text."""
    if isinstance(key, Operator):
        return "\n".join(_head("operators", key, DEFAULT_OPERATOR_SCOPES)) + "\n"
    lines = _head("keys", key, DEFAULT_SCOPES)
    for name in (*_COUNTS, *_PRIORITIES, "min_slo_ttft_ms"):
        value = getattr(key, name)
        if value is not None:
            lines.append(f"{name} = {value!r}")
    if key.share != 1:
        lines.append(f"share = {key.share}")
    return "\n".join(lines) + "\n"


def _head(what: str, key: ApiKey | Operator, default_scopes: frozenset[str]) -> list[str]:
    lines = [f"[{what}.{key.name}]", f'hash = "{key.hash}"']
    if key.scopes != default_scopes:
        scopes = ", ".join(f'"{scope}"' for scope in sorted(key.scopes))
        lines.append(f"scopes = [{scopes}]")
    return lines
