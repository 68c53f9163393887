"""Structured logs: one event per line, with request ids and never a prompt's text."""

from __future__ import annotations

import logging
import os
import sys
from io import TextIOBase
from typing import TextIO, cast

import structlog

from pdmesh.config import TelemetryConfig
from pdmesh.errors import ConfigError


class UnfailingStream(TextIOBase):
    """Text stream to a file descriptor that never raises. The next write that succeeds reports how many failed.

    A full disk should not end a service through its log. Failed text is not kept, because it would fail again at each
    write.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._num_lost = 0

    def write(self, text: str) -> int:
        told = f"{self._num_lost} writes before this one were lost\n" if self._num_lost else ""
        rest = memoryview((told + text).encode(errors="backslashreplace"))
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
            self._num_lost = 0
        except OSError:
            self._num_lost += 1
        return len(text)


def configure_logging(service: str, config: TelemetryConfig) -> None:
    """Send structlog and the standard library's warnings to stderr. Raises ConfigError for an unknown level."""
    level = logging.getLevelNamesMapping().get(config.log_level.upper())
    if level is None:
        raise ConfigError(f"telemetry.log_level is {config.log_level!r}: use debug, info, warning or error")
    stream = cast(TextIO, UnfailingStream(2))
    renderer: structlog.typing.Processor
    if config.log_format == "json" or (config.log_format == "auto" and not sys.stderr.isatty()):
        renderer = structlog.processors.JSONRenderer()
    else:
        renderer = structlog.dev.ConsoleRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=stream),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
    logging.basicConfig(level=max(level, logging.WARNING), stream=stream, format="%(name)s: %(message)s")
