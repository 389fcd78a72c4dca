from __future__ import annotations

import io
import json
import logging
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import structlog

from understudy.evaluator.types import EvaluationOutcome, EvaluationRecord
from understudy.service.calls.audit import AUDIT_LOGGER, REFUSAL, audit_record, audit_refused_request
from understudy.service.calls.served_call import CALL_LOGGER, REQUEST_ID, accept_id
from understudy.service.logging import WITHHELD, RepetitionFilter, configure
from understudy.service.settings import LogFormat


def lines_of(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_one_json_object_with_its_fields() -> None:
    stream = io.StringIO()
    configure(level="info", log_format="json", stream=stream)
    structlog.get_logger("room").info("loaded", step=7)
    (line,) = lines_of(stream)
    assert (line["event"], line["step"], line["level"], line["logger"]) == ("loaded", 7, "info", "room")
    assert str(line["timestamp"]).endswith("Z")


def test_lines_of_the_standard_library_look_the_same() -> None:
    stream = io.StringIO()
    configure(level="info", log_format="json", stream=stream)
    logging.getLogger("library").warning("took %d s", 3)
    (line,) = lines_of(stream)
    assert (line["event"], line["level"], line["logger"]) == ("took 3 s", "warning", "library")


def test_the_extra_fields_of_the_standard_library_s_lines_are_written() -> None:
    stream = io.StringIO()
    configure(level="info", log_format="json", stream=stream)
    extra = {"step": 7, "metrics": {"loss": 0.5}, "color_message": "\x1b[36m7"}
    logging.getLogger("library").info("evaluation recorded", extra=extra)
    (line,) = lines_of(stream)
    assert (line["event"], line["step"], line["metrics"]) == ("evaluation recorded", 7, {"loss": 0.5})
    assert "color_message" not in line


def test_lines_of_a_call_carry_its_id() -> None:
    stream = io.StringIO()
    configure(level="info", log_format="json", stream=stream)
    token = REQUEST_ID.set("abc")
    structlog.get_logger().info("inside")
    REQUEST_ID.reset(token)
    structlog.get_logger().info("outside")
    inside, outside = lines_of(stream)
    assert inside["request_id"] == "abc"
    assert "request_id" not in outside


def test_a_traceback_is_part_of_its_line() -> None:
    stream = io.StringIO()
    configure(level="info", log_format="json", stream=stream)
    structlog.get_logger().error("failed", exc_info=ValueError("why"))
    (line,) = lines_of(stream)
    assert "ValueError: why" in str(line["exception"])


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_what_may_quote_a_request_is_withheld_where_its_values_are(
    monkeypatch: pytest.MonkeyPatch, log_format: LogFormat
) -> None:
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    stream = io.StringIO()
    configure(level="debug", log_format=log_format, stream=stream, withhold_values=True)

    withheld = "hunter2"
    failure = RuntimeError(withheld)
    failure.__cause__ = ValueError(withheld)
    for log in (structlog.get_logger("room"), logging.getLogger("library")):
        try:
            raise failure
        except RuntimeError:
            log.exception("failed")
        log.error("failed again", exc_info=failure)
    logging.getLogger("asyncio").error("Task exception was never retrieved\nfuture: %s", withheld)
    calls = structlog.get_logger(CALL_LOGGER)
    calls.info("call ended", code="INVALID_ARGUMENT", message=withheld)
    calls.info("call ended", code="NOT_FOUND", message="no version 5")

    written = stream.getvalue()
    assert withheld not in written
    for text in ("raise failure", "RuntimeError", "ValueError", "Task exception", WITHHELD, "no version 5"):
        assert text in written
    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == "2"


def test_no_value_controls_the_terminal_or_begins_a_line() -> None:
    stream = io.StringIO()
    configure(level="info", log_format="console", stream=stream)
    hostile, escaped = "/\x1b[31mred\x07\u202e\rforged", r"/\x1b[31mred\x07\u202e\rforged"
    structlog.get_logger("x").error("failed", path=f"{hostile}\nforged", exc_info=ValueError(hostile))
    logging.getLogger("y").warning("about %s", f"{hostile}\nforged")

    first, *traceback, last = stream.getvalue().splitlines()
    assert rf"{escaped}\nforged" in first
    assert traceback[-1] == f"ValueError: {escaped}"
    assert rf"about {escaped}\nforged" in last


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_a_long_value_is_cut_and_a_traceback_is_not(log_format: LogFormat) -> None:
    stream = io.StringIO()
    configure(level="info", log_format=log_format, stream=stream)
    audit_refused_request("127.0.0.1:1", "/" + "p" * 60_000, "n" * 60_000)
    assert stream.getvalue().count("... (60000 characters)") == 1
    assert 2_000 < len(stream.getvalue()) < 10_000
    structlog.get_logger("x").error("failed", exc_info=ValueError("v" * 60_000))
    assert "v" * 60_000 in stream.getvalue()


def test_lines_below_the_level_are_not_written() -> None:
    stream = io.StringIO()
    configure(level="warning", log_format="json", stream=stream)
    structlog.get_logger().info("quiet")
    logging.getLogger("library").info("quiet")
    assert stream.getvalue() == ""


def test_the_console_form_is_for_people() -> None:
    stream = io.StringIO()
    configure(level="info", log_format="console", stream=stream)
    structlog.get_logger().info("loaded", step=7)
    assert "loaded" in stream.getvalue()
    assert not stream.getvalue().startswith("{")


@pytest.mark.parametrize("candidate", [None, "", "two words", "line\nbreak", "x" * 129, "\u00e9", b"bytes"])
def test_an_unfit_request_id_is_replaced(candidate: str | bytes | None) -> None:
    accepted = accept_id(candidate)
    assert accepted != candidate
    assert len(accepted) == 32


def test_a_fit_request_id_is_kept() -> None:
    assert accept_id("trace-1/2:3") == "trace-1/2:3"


class Clock:
    """A clock that goes only when told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def written_through(clock: Clock) -> tuple[io.StringIO, logging.Handler]:
    """Configure the logs with a clock; return the stream."""
    stream = io.StringIO()
    configure(level="info", log_format="json", stream=stream)
    (handler,) = logging.getLogger().handlers
    handler.filters[:] = [RepetitionFilter(clock)]
    return stream, handler


@pytest.mark.parametrize("make", [structlog.get_logger, logging.getLogger])
def test_a_repeated_warning_is_written_some_times_in_an_interval_and_then_with_the_number_left_out(
    make: Callable[[str], Any],
) -> None:
    clock = Clock()
    stream, _ = written_through(clock)
    log = make("room")
    for _ in range(1000):
        log.warning("checkpoint in quarantine")
    log.warning("another one")
    log.info("loaded")
    assert [line["event"] for line in lines_of(stream)] == [*["checkpoint in quarantine"] * 10, "another one", "loaded"]
    clock.now += 10
    log.warning("checkpoint in quarantine")
    log.warning("checkpoint in quarantine")
    (first, second) = lines_of(stream)[-2:]
    assert first["left_out"] == 990
    assert "left_out" not in second


def test_texts_with_different_values_are_of_one_kind_and_their_number_is_bounded() -> None:
    stream, handler = written_through(Clock())
    for number in range(50):
        logging.getLogger("library").warning("the file %d is damaged", number)
    assert len(lines_of(stream)) == 10
    for number in range(5000):
        logging.getLogger("library").warning(f"the file {number} is damaged")  # noqa: G004 - a careless library
    (limit,) = handler.filters
    assert isinstance(limit, RepetitionFilter)
    assert len(limit._kinds) == 1000


def test_the_lines_of_failed_calls_are_limited_and_those_of_the_audit_are_not() -> None:
    stream, _ = written_through(Clock())
    for name in (CALL_LOGGER, AUDIT_LOGGER, "room"):
        for _ in range(300):
            logging.getLogger(name).info("call ended")
    counts = Counter(line["logger"] for line in lines_of(stream))
    assert counts == {CALL_LOGGER: 100, AUDIT_LOGGER: 300, "room": 300}


def test_the_audit_s_refusals_are_limited_for_each_host_and_method_and_its_decisions_are_not() -> None:
    clock = Clock()
    stream, _ = written_through(clock)

    def refuse(host: str, count: int) -> None:
        for port in range(count):
            audit_refused_request(f"{host}:{port}", f"/{port}", "no certificate")

    refuse("10.0.0.1", 300)
    refuse("10.0.0.2", 1)
    for step in range(300):
        record = EvaluationRecord(
            sequence=step, step=step, checkpoint_digest="", dataset="test", outcome=EvaluationOutcome.REFUSED
        )
        audit_record(record)
    events = Counter((line["event"], str(line.get("peer", "")).partition(":")[0]) for line in lines_of(stream))
    assert events == {(REFUSAL, "10.0.0.1"): 20, (REFUSAL, "10.0.0.2"): 1, ("gate decided", ""): 300}
    clock.now += 10
    refuse("10.0.0.1", 1)
    assert lines_of(stream)[-1]["left_out"] == 280
