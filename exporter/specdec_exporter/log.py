"""Logging: one line a change, as key=value on standard error."""

from __future__ import annotations

import logging
import sys

import structlog


def configure(level: str) -> None:
    """Send our log, and the warnings of the libraries, to standard error in logfmt."""
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(
        stream=sys.stderr,
        level=max(number, logging.WARNING),
        format="level=%(levelname)s %(message)s",
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        # Looked up at each message, since standard error may be replaced.
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
    )
