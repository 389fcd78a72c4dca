"""Structured logs on standard error, for structlog's and the standard library's loggers."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from understudy.service.calls.served_call import AUDIT_LOGGER, REQUEST_ID
from understudy.service.settings import LogFormat, LogLevel


def configure(*, level: LogLevel, log_format: LogFormat, stream: TextIO | None = None) -> None:
    """Write all log lines of this process to one stream in one format.

    Args:
        level: The lowest level to write.
        log_format: ``json``, ``console``, or ``auto``: console if the stream is a terminal.
        stream: Where to write; standard error by default.
    """
    stream = sys.stderr if stream is None else stream
    threshold = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _add_request_id,
    ]
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[
                *shared,
                structlog.stdlib.ExtraAdder(),
                _drop_color_message,
                structlog.stdlib.PositionalArgumentsFormatter(),
            ],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_renderers(log_format, stream)],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(threshold)
    logging.getLogger(AUDIT_LOGGER).setLevel(logging.INFO)
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )


def writes_json(log_format: LogFormat, stream: TextIO) -> bool:
    """Return whether log lines on a stream are JSON."""
    return log_format == "json" or (log_format == "auto" and not stream.isatty())


def _renderers(log_format: LogFormat, stream: TextIO) -> Sequence[Processor]:
    if not writes_json(log_format, stream):
        return [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]


def _add_request_id(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    if identifier := REQUEST_ID.get():
        event.setdefault("request_id", identifier)
    return event


def _drop_color_message(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Remove uvicorn's second copy of its message, for terminals."""
    event.pop("color_message", None)
    return event
