"""Structured logs: one event a line, with request ids and never a prompt's text."""

from __future__ import annotations

import logging
import sys

import structlog

from pdmesh.config import TelemetryConfig
from pdmesh.errors import ConfigError


def configure_logging(service: str, config: TelemetryConfig) -> None:
    """Send structlog and the standard library's warnings to stderr. Raises ConfigError for an unknown level."""
    level = logging.getLevelNamesMapping().get(config.log_level.upper())
    if level is None:
        raise ConfigError(f"telemetry.log_level is {config.log_level!r}: use debug, info, warning or error")
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
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
    logging.basicConfig(level=max(level, logging.WARNING), stream=sys.stderr, format="%(name)s: %(message)s")
