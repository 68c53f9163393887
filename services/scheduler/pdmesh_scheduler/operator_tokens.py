"""Operators, whose tokens in calls permit them to look at the running mesh or to change it.

The file of operators is read again if it has changed when a token is checked. If the changed file is wrong, the known
operators stay. A file without operators admits none; in particular, it does not admit every caller on this machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import structlog

from pdmesh.apikeys import OPERATOR_SCOPES, Operator, hash_key, parse_operators
from pdmesh.config import SecurityConfig
from pdmesh.errors import ConfigError
from pdmesh.watched_file import WatchedFile
from pdmesh.wire.endpoint import OPERATOR_METADATA

log = structlog.get_logger()


class Operators:
    """The known operators by the hashes of their tokens, so that the time of a look-up reveals no token."""

    def __init__(self, security: SecurityConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """Raise ConfigError if the file of operators cannot be used."""
        path = security.operators_file
        self._file = None if path is None else WatchedFile(path, "security.operators_file", clock)
        self._single = security.operator_token
        self._by_hash = self._read()
        self._tell("operators")

    def __bool__(self) -> bool:
        """Return whether changes need a token, also if no operator has one; else they must come from this machine."""
        return self._file is not None or bool(self._single)

    def who(self, metadata: Mapping[str, str]) -> Operator | None:
        """Return the operator whose token a call's metadata shows; None if there is none. Read a changed file first."""
        self._look_again()
        try:
            token = bytes.fromhex(metadata.get(OPERATOR_METADATA, "")).decode("utf-8", "surrogateescape")
        except ValueError:
            return None
        return self._by_hash.get(hash_key(token)) if token else None

    def admits(self, metadata: Mapping[str, str]) -> bool:
        """Return whether a call's metadata shows the token of an operator with read access."""
        operator = self.who(metadata)
        return operator is not None and operator.may_read

    def _look_again(self) -> None:
        if self._file is None or not self._file.has_changed():
            return
        try:
            self._by_hash = self._read()
        except ConfigError as error:
            log.error("cannot read the operators file; the previous operators stay in use", error=str(error))
            return
        self._tell("operators reloaded")

    def _tell(self, what: str) -> None:
        names = [each.name for each in self._by_hash.values()]
        if names:
            log.info(what, operators=names)
        elif self._file is not None:
            log.warning("the operators file is empty: no operator may change the mesh", path=str(self._file.path))

    def _read(self) -> dict[str, Operator]:
        """Return the operators of settings and file by their hashes. Raise ConfigError if the file is malformed."""
        operators: list[Operator] = []
        if self._single:
            operators.append(Operator(name="operator_token", hash=hash_key(self._single), scopes=OPERATOR_SCOPES))
        if self._file is not None:
            operators += parse_operators(self._file.text(), self._file.where).values()
        return {each.hash: each for each in operators}
