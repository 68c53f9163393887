"""Who may look at the running mesh and change it: operators, by the tokens that they show.

The file of operators is read again when it has changed, which is looked at when a token is checked. A file that is
wrong then leaves them as they were.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import structlog

from pdmesh.apikeys import OPERATOR_SCOPES, Operator, hash_key, parse_operators
from pdmesh.config import SecurityConfig
from pdmesh.errors import ConfigError
from pdmesh.wire.endpoint import OPERATOR_METADATA

log = structlog.get_logger()

#: At most so often the file is looked at.
LOOK_S = 1.0


class Operators:
    """By the hashes of their tokens: how long a look-up takes tells nothing of a token."""

    def __init__(self, security: SecurityConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ConfigError if there is a file of operators that cannot be used."""
        self._clock = clock
        self._file = security.operators_file
        self._single = security.operator_token
        self._looked_s = clock()
        self._seen = None if self._file is None else _state_of(self._file)
        self._by_hash = self._read()

    def __bool__(self) -> bool:
        """Whether there are any: else changes come from this machine."""
        return bool(self._by_hash)

    def who(self, metadata: Mapping[str, str]) -> Operator | None:
        """Whose token a call's metadata shows; None if it is nobody's."""
        self._look_again()
        try:
            token = bytes.fromhex(metadata.get(OPERATOR_METADATA, "")).decode("utf-8", "surrogateescape")
        except ValueError:
            return None
        return self._by_hash.get(hash_key(token)) if token else None

    def admits(self, metadata: Mapping[str, str]) -> bool:
        """Whether a call's metadata shows the token of an operator who may ask."""
        operator = self.who(metadata)
        return operator is not None and operator.may_read

    def _look_again(self) -> None:
        now_s = self._clock()
        if self._file is None or now_s < self._looked_s + LOOK_S:
            return
        self._looked_s = now_s
        seen = _state_of(self._file)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._by_hash = self._read()
        except ConfigError as error:
            log.error("the operators stay as they were", error=str(error))
            return
        log.info("operators read again", operators=[each.name for each in self._by_hash.values()])

    def _read(self) -> dict[str, Operator]:
        """Raises ConfigError."""
        operators: list[Operator] = []
        if self._single:
            operators.append(Operator(name="operator_token", hash=hash_key(self._single), scopes=OPERATOR_SCOPES))
        if self._file is not None:
            where = f"security.operators_file {self._file}"
            try:
                text = self._file.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise ConfigError(f"cannot read {where}: {error}") from error
            operators += parse_operators(text, where).values()
        return {each.hash: each for each in operators}


def _state_of(file: Path) -> tuple[int, ...] | None:
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino  # a change of who may read it counts
