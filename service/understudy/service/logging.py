"""Structured logs on standard error, for structlog's and the standard library's loggers."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from understudy.evaluator.evaluator_errors import with_causes
from understudy.service.calls.audit import AUDIT_LOGGER, REFUSAL
from understudy.service.calls.served_call import CALL_LOGGER, REQUEST_ID
from understudy.service.calls.status import Code
from understudy.service.calls.trace import TRACE_IDS
from understudy.service.settings import LogFormat, LogLevel

WITHHELD: Final = "not logged, as it may quote values that are redacted"
"""Stands for the message of a call that was refused for what its request holds."""

_TENSORFLOW_LEVEL: Final = "TF_CPP_MIN_LOG_LEVEL"
_ERRORS_ONLY: Final = 2

_INTERVAL_SECONDS: Final = 10.0
_MOST_WARNINGS: Final = 10
_MOST_CALLS: Final = 100
_MOST_REFUSALS: Final = 20
_MOST_KINDS: Final = 1000
_LONGEST_VALUE: Final = 2048


def configure(
    *, level: LogLevel, log_format: LogFormat, stream: TextIO | None = None, withhold_values: bool = False
) -> None:
    """Write all log lines of this process to one stream in one format.

    Args:
        level: The lowest level to write.
        log_format: ``json``, ``console``, or ``auto``: console if the stream is a terminal.
        stream: Where to write; standard error by default.
        withhold_values: Whether to leave out what may quote the values of a request: the messages of calls that were
            refused for their content, the texts of exceptions in tracebacks, and TensorFlow's own warnings. TensorFlow
            must not be imported yet.
    """
    if withhold_values:
        _silence_tensorflow()
    withhold: list[Processor] = [_withhold_values] if withhold_values else []
    stream = sys.stderr if stream is None else stream
    threshold = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _add_ids,
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
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                _cut_long_values,
                *withhold,
                *_renderers(log_format, stream),
            ],
        )
    )
    handler.addFilter(RepetitionFilter())
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


@dataclass
class _Repeated:
    """The lines of one kind in an interval: when it began, how many were written, and how many were not."""

    began: float
    written: int = 0
    left_out: int = 0


class RepetitionFilter(logging.Filter):
    """Writes at most some lines of each kind in an interval; the first one after it says how many were left out.

    A kind is a logger, a level and the text without its values. Warnings and errors are limited, and the lines about
    calls that failed: a caller or a bad checkpoint can cause those at any rate. Of the audit log only the lines about
    refused callers are, each host and method apart, so that one cannot hide another. Thread-safe.

    Args:
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._kinds: OrderedDict[tuple[str, int, str], _Repeated] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write a line; add ``left_out`` to it if it is the first after lines that were not."""
        most = _most_lines(record)
        if most is None:
            return True
        with self._lock:
            left_out = self._count((record.name, record.levelno, _text(record)), most)
        if left_out and isinstance(record.msg, dict):
            record.msg = {**record.msg, "left_out": left_out}
        elif left_out:
            record.left_out = left_out
        return left_out is not None

    def _count(self, kind: tuple[str, int, str], most: int) -> int | None:
        """Count a line; return how many were left out before it, or None if it is left out itself."""
        now = self._clock()
        repeated = self._kinds.setdefault(kind, _Repeated(now))
        self._kinds.move_to_end(kind)
        if len(self._kinds) > _MOST_KINDS:
            self._kinds.popitem(last=False)
        before = 0
        if now - repeated.began >= _INTERVAL_SECONDS:
            before = repeated.left_out
            repeated = self._kinds[kind] = _Repeated(now)
        if repeated.written >= most:
            repeated.left_out += 1
            return None
        repeated.written += 1
        return before


def _most_lines(record: logging.LogRecord) -> int | None:
    """Return how many lines of a record's kind are written in an interval; None if all are."""
    if record.name == AUDIT_LOGGER:
        return _MOST_REFUSALS if _text(record).startswith(REFUSAL) else None
    if record.levelno >= logging.WARNING:
        return _MOST_WARNINGS
    is_about_a_call = record.name == CALL_LOGGER and record.levelno >= logging.INFO
    return _MOST_CALLS if is_about_a_call else None


def _text(record: logging.LogRecord) -> str:
    """Return the text without its values; that about a refused caller with its host and method."""
    if not isinstance(record.msg, dict):
        return str(record.msg)
    text = str(record.msg.get("event", ""))
    if text != REFUSAL:
        return text
    host = str(record.msg.get("peer", "")).rpartition(":")[0]
    return f"{text} {host} {record.msg.get('method', '')}"


def writes_json(log_format: LogFormat, stream: TextIO) -> bool:
    """Return whether log lines on a stream are JSON."""
    return log_format == "json" or (log_format == "auto" and not stream.isatty())


def _renderers(log_format: LogFormat, stream: TextIO) -> Sequence[Processor]:
    if not writes_json(log_format, stream):
        console = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        return [structlog.processors.format_exc_info, _escape_controls, console]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]


def _cut_long_values(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Cut long values: callers choose names and paths of up to 60 KiB."""
    return {key: _cut(value) for key, value in event.items()}


def _cut(value: Any) -> Any:
    if not isinstance(value, str) or len(value) <= _LONGEST_VALUE:
        return value
    return f"{value[:_LONGEST_VALUE]}... ({len(value)} characters)"


def _escape_controls(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Escape what would control the terminal or begin a line: callers and files choose parts of the values."""
    return {key: _escaped(value, "\n" if key == "exception" else "") for key, value in event.items()}


def _escaped(value: Any, keep: str) -> Any:
    if not isinstance(value, str) or value.isprintable():
        return value
    return "".join(each if each.isprintable() or each in keep else repr(each)[1:-1] for each in value)


def _add_ids(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    if identifier := REQUEST_ID.get():
        event.setdefault("request_id", identifier)
    if (ids := TRACE_IDS.get()) is not None:
        event.update(ids._asdict())
    return event


def _silence_tensorflow() -> None:
    """Let TensorFlow write errors only: its warnings quote the values that an operation refuses."""
    chosen = os.environ.get(_TENSORFLOW_LEVEL, "")
    os.environ[_TENSORFLOW_LEVEL] = str(max(int(chosen) if chosen.isdecimal() else 0, _ERRORS_ONLY))


def _withhold_values(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Replace what may quote the values of a request.

    Of the statuses only INVALID_ARGUMENT has a text about a request's content; see `understudy.service.calls.status`.
    """
    if event.get("logger") == CALL_LOGGER and event.get("code") == Code.INVALID_ARGUMENT.name:
        event["message"] = WITHHELD
    if event.get("logger") == "asyncio":  # its further lines are the repr of a failed task
        event["event"] = str(event["event"]).partition("\n")[0]
    found = event.pop("exc_info", None)
    error = sys.exc_info()[1] if found is True else found[1] if isinstance(found, tuple) else found
    if isinstance(error, BaseException):
        event["exception"] = "\n".join(_frames_of(error))
    return event


def _frames_of(error: BaseException) -> Iterator[str]:
    """Yield the traceback of an exception and of its causes, without their texts."""
    for cause in with_causes(error):
        yield from (frame.rstrip("\n") for frame in traceback.format_tb(cause.__traceback__))
        yield type(cause).__qualname__


def _drop_color_message(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Remove uvicorn's second copy of its message, for terminals."""
    event.pop("color_message", None)
    return event
