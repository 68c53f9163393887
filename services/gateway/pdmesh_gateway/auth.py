"""API keys: identify each client, check its scopes, and limit its requests and tokens.

Checking a key reloads the file of keys if it has changed. If the new file is wrong, the previous keys stay in use; if
no key is left, no client may enter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import structlog

from pdmesh.apikeys import SCOPES, ApiKey, hash_key, parse_api_keys
from pdmesh.config import SecurityConfig
from pdmesh.errors import ConfigError, RequestRejected
from pdmesh.metrics import Slo
from pdmesh.watched_file import WatchedFile

log = structlog.get_logger()

#: Key of every client where no key is required.
ANYBODY = ApiKey(name="", hash="", scopes=SCOPES)


class Allowance:
    """Rate limit in units a minute. A burst may use up to one minute's units; charging afterwards may leave a debt."""

    def __init__(self, per_minute: float, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = per_minute
        self._at_s = clock()

    def wait_s(self) -> float:
        """Return the seconds until a unit is available; 0 if one is available now."""
        self._refill()
        return 0.0 if self._level >= 1 else (1 - self._level) * 60 / self.per_minute

    def use(self, amount: float) -> None:
        self._refill()
        self._level -= amount

    def _refill(self) -> None:
        now_s = self._clock()
        self._level = min(self.per_minute, self._level + (now_s - self._at_s) * self.per_minute / 60)
        self._at_s = now_s


class Client:
    """An API key with its current use."""

    def __init__(self, key: ApiKey, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._num_running = 0
        self._requests: Allowance | None = None
        self._tokens: Allowance | None = None
        self.key = key
        self.change(key)

    @property
    def name(self) -> str:
        return self.key.name

    @property
    def share(self) -> int:
        return self.key.share

    def change(self, key: ApiKey) -> None:
        """Replace the entry of the key. Use that counts against an unchanged limit is kept."""
        self.key = key
        self._requests = self._allowance(self._requests, key.requests_per_minute)
        self._tokens = self._allowance(self._tokens, key.tokens_per_minute)

    def check_scope(self, scope: str) -> None:
        """Raise RequestRejected (403) if the key lacks ``scope``."""
        if scope not in self.key.scopes:
            raise RequestRejected(
                f"The key {self.name!r} needs the scope {scope!r} for this request.",
                status=403,
                code="missing_scope",
            )

    def check_service_level(self, priority: int, slo: Slo) -> None:
        """Raise RequestRejected if the key may not ask for this priority or for so short a time to first token."""
        low, high, least_ms = self.key.min_priority, self.key.max_priority, self.key.min_slo_ttft_ms
        if (low is not None and priority < low) or (high is not None and priority > high):
            raise RequestRejected(
                f"`priority` must be {_range(low, high)} for the key {self.name!r}, got {priority}.",
                param="priority",
                code="invalid_value",
            )
        if least_ms is not None and slo.ttft_s is not None and slo.ttft_s * 1e3 < least_ms:
            raise RequestRejected(
                f"The key {self.name!r} may ask for a time to first token of {least_ms:g} ms or more, "
                f"not of {slo.ttft_s * 1e3:g} ms.",
                param="slo_ttft_ms",
                code="invalid_value",
            )

    @contextmanager
    def generating(self, *, num_choices: int, num_prompt_tokens: int) -> Generator[Callable[[int], None]]:
        """Charge one request and its prompt tokens, and count ``num_choices`` choices as running within the block.

        Yields a function that charges output tokens; call it with their number. Raises RequestRejected (429) if a limit
        is reached.
        """
        most = self.key.max_concurrent_requests
        if most is not None and self._num_running + num_choices > most:
            raise self._limited(f"{most:g} concurrent requests", 1.0)
        for allowance, unit in ((self._requests, "requests"), (self._tokens, "tokens")):
            if allowance is not None and (wait_s := allowance.wait_s()) > 0:
                raise self._limited(f"{allowance.per_minute:g} {unit} per minute", wait_s)
        if self._requests is not None:
            self._requests.use(1)
        self._use_tokens(num_prompt_tokens)
        self._num_running += num_choices
        try:
            yield self._use_tokens
        finally:
            self._num_running -= num_choices

    def _use_tokens(self, num_tokens: int) -> None:
        if self._tokens is not None:
            self._tokens.use(num_tokens)

    def _limited(self, limit: str, retry_after_s: float) -> RequestRejected:
        return RequestRejected(
            f"Rate limit reached for the key {self.name!r}: {limit}.",
            status=429,
            code="rate_limit_exceeded",
            retry_after_s=retry_after_s,
        )

    def _allowance(self, old: Allowance | None, per_minute: float | None) -> Allowance | None:
        if per_minute is None:
            return None
        return old if old is not None and old.per_minute == per_minute else Allowance(per_minute, self._clock)


class ApiKeys:
    """Set of accepted API keys. If neither a key nor a file of keys is set, every client may enter."""

    def __init__(self, security: SecurityConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """Raise ConfigError if the file of keys cannot be used or holds no key."""
        self._clock = clock
        path = security.api_keys_file
        self._file = None if path is None else WatchedFile(path, "security.api_keys_file", clock)
        self._single = security.api_key
        #: Clients by the hash of the key.
        self._clients: dict[str, Client] = {}
        self._anybody = Client(ANYBODY, clock)
        self._take(self._read())
        if self._file is not None and not self._clients:
            raise ConfigError(f"{self._file.where} contains no key: create one with `pdmesh keys new NAME`")

    def __bool__(self) -> bool:
        """Return whether a key is required."""
        return self._file is not None or bool(self._clients)

    def check(self, authorization: str | None, api_key: str | None = None) -> Client:
        """Return the client of an ``Authorization`` header or, without one, of an ``x-api-key``.

        Raise RequestRejected (401) for a missing or unknown key. If no key is required, all callers are one client.
        """
        if not self:
            return self._anybody
        self._look_again()
        if authorization is None and api_key is not None:
            authorization = f"Bearer {api_key}"
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _unauthorized("You didn't provide an API key: send it as `Authorization: Bearer KEY`.")
        # The lookup is by hash, so its duration reveals nothing about a key.
        client = self._clients.get(hash_key(key.strip()))
        if client is None:
            raise _unauthorized("Incorrect API key provided.")
        return client

    def _look_again(self) -> None:
        if self._file is None or not self._file.has_changed():
            return
        try:
            keys = self._read()
        except ConfigError as error:
            log.error("cannot read the API keys; the previous keys stay in use", error=str(error))
            return
        self._take(keys)
        (log.info if keys else log.warning)("API keys reloaded", num_keys=len(keys))

    def _take(self, keys: list[ApiKey]) -> None:
        by_name = {client.name: client for client in self._clients.values()}
        clients: dict[str, Client] = {}
        for key in keys:
            client = by_name.get(key.name) or Client(key, self._clock)
            client.change(key)
            clients[key.hash] = client
        self._clients = clients

    def _read(self) -> list[ApiKey]:
        """Return the keys of the settings and of the file. Raise ConfigError if the file is malformed."""
        keys: list[ApiKey] = []
        if self._single:
            key = _sendable(self._single, "security.api_key")
            keys.append(ApiKey(name="api_key", hash=hash_key(key), scopes=SCOPES))
        if self._file is not None:
            text, where = self._file.text(), self._file.where
            keys += parse_api_keys(text, where).values() if self._file.path.suffix == ".toml" else _lines(text, where)
        return keys


def _lines(text: str, where: str) -> list[ApiKey]:
    """Return the keys of a plain file: one key a line, without limits. ``#`` begins a comment line."""
    lines = dict.fromkeys(line.strip() for line in text.splitlines())
    hashes = [hash_key(_sendable(line, where)) for line in lines if line and not line.startswith("#")]
    return [ApiKey(name=f"key-{digest[7:15]}", hash=digest) for digest in hashes]


def _sendable(key: str, where: str) -> str:
    """Return a key as `header_text` would read it from a header. Raises ConfigError if no header can carry it."""
    key = header_text(key.strip().encode("utf-8", "surrogateescape"))
    if not key or any((char < " " and char != "\t") or char == "\x7f" for char in key):
        raise ConfigError(f"{where} has a key with characters that HTTP headers cannot carry: use printable ASCII")
    return key


def header_text(value: bytes) -> str:
    """Return the value of a header: UTF-8 or else, by the older rules, Latin-1."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _range(low: int | None, high: int | None) -> str:
    return " and ".join(
        part
        for part in (f"at least {low}" if low is not None else "", f"at most {high}" if high is not None else "")
        if part
    )


def _unauthorized(message: str) -> RequestRejected:
    return RequestRejected(message, status=401, code="invalid_api_key")
