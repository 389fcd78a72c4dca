from __future__ import annotations

import time

import grpc
import pytest
import structlog

from understudy.evaluator import evaluator_errors
from understudy.service.calls.status import CALLER_GONE, DEADLINE_PASSED, STATUS_CODES, Code, caller_gone, failure_of
from understudy.wire import WireError

EXPECTED = [
    (evaluator_errors.InvalidInputError("text"), Code.INVALID_ARGUMENT),
    (WireError("text"), Code.INVALID_ARGUMENT),
    (evaluator_errors.VersionNotFoundError("text"), Code.NOT_FOUND),
    (evaluator_errors.DatasetNotFoundError("text"), Code.NOT_FOUND),
    (evaluator_errors.NotReadyError("text"), Code.UNAVAILABLE),
    (evaluator_errors.DrainingError("text"), Code.UNAVAILABLE),
    (evaluator_errors.OverloadedError("text"), Code.RESOURCE_EXHAUSTED),
    (evaluator_errors.DeadlineExceededError("text"), Code.DEADLINE_EXCEEDED),
    (evaluator_errors.CancelledError("text"), Code.CANCELLED),
    (evaluator_errors.StreamIdleError("text"), Code.ABORTED),
    (evaluator_errors.ModelChangedError("text"), Code.FAILED_PRECONDITION),
    (evaluator_errors.NotEvaluableError("text"), Code.FAILED_PRECONDITION),
    (evaluator_errors.ConfigurationError("text"), Code.FAILED_PRECONDITION),
    (evaluator_errors.DeviceError("text"), Code.FAILED_PRECONDITION),
    (evaluator_errors.LoadError("text"), Code.FAILED_PRECONDITION),
    (evaluator_errors.LedgerError("text"), Code.FAILED_PRECONDITION),
    (evaluator_errors.StorageError("text"), Code.FAILED_PRECONDITION),
    (evaluator_errors.ClusterError("text"), Code.UNAVAILABLE),
]


@pytest.mark.parametrize(("error", "code"), EXPECTED, ids=[type(error).__name__ for error, _ in EXPECTED])
def test_each_expected_error_has_its_code_and_keeps_its_words(error: Exception, code: Code) -> None:
    failure = failure_of(error)
    assert (failure.code, failure.message) == (code, "text")


def test_every_error_of_the_evaluator_has_a_code_or_an_ancestor_that_has() -> None:
    declared = [each for each in vars(evaluator_errors).values() if isinstance(each, type)]
    kinds = {kind for kind in declared if issubclass(kind, evaluator_errors.EvaluatorError)}
    assert [
        kind for kind in kinds - {evaluator_errors.EvaluatorError} if not STATUS_CODES.keys() & set(kind.__mro__)
    ] == []


def test_a_subclass_goes_with_its_nearest_ancestor() -> None:
    class OtherArchitectureError(evaluator_errors.LoadError):
        pass

    assert failure_of(OtherArchitectureError("text")).code is Code.FAILED_PRECONDITION


def test_only_an_overload_says_when_to_try_again() -> None:
    assert failure_of(evaluator_errors.OverloadedError("text", retry_after_seconds=0.5)).retry_after_seconds == 0.5
    assert failure_of(evaluator_errors.NotReadyError("text")).retry_after_seconds is None


def test_a_defect_is_told_by_an_id_and_logged_under_it() -> None:
    with structlog.testing.capture_logs() as lines:
        failure = failure_of(KeyError("secret"))
    (line,) = lines
    assert failure.code is Code.INTERNAL
    assert "secret" not in failure.message
    assert line["incident"] in failure.message


def test_codes_are_grpcs_own() -> None:
    assert {code.name: code.value for code in Code} == {status.name: status.value[0] for status in grpc.StatusCode}


def test_labels_are_those_of_go() -> None:
    assert [Code.OK.label, Code.CANCELLED.label, Code.DEADLINE_EXCEEDED.label] == ["OK", "Canceled", "DeadlineExceeded"]


def test_a_caller_that_gives_up_just_before_its_deadline_has_met_it() -> None:
    assert caller_gone(time.monotonic() + 0.04) is DEADLINE_PASSED
    assert caller_gone(time.monotonic() - 1.0) is DEADLINE_PASSED
    assert caller_gone(time.monotonic() + 100.0) is CALLER_GONE
    assert caller_gone(None) is CALLER_GONE
