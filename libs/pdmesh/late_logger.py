"""A logger for modules that short commands import: structlog and rich, which comes with it, take 0.1 s to import."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger


def late_logger() -> BoundLogger:
    """Return structlog's logger. The first call imports structlog."""
    import structlog

    logger: BoundLogger = structlog.get_logger()
    return logger
