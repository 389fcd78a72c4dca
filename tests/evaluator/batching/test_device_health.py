"""What counts as a device's failure, and when it has failed for good."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tensorflow as tf

from understudy.evaluator.batching.device_health import DeviceHealth
from understudy.evaluator.evaluator_errors import CancelledError, InvalidInputError
from understudy.evaluator.types import DeviceState

WORKING, FAILING, FAILED = DeviceState.WORKING, DeviceState.FAILING, DeviceState.FAILED
DEVICE = tf.errors.InternalError(None, None, "CUDA_ERROR_ILLEGAL_ADDRESS\nand more")
VALUE = tf.errors.InvalidArgumentError(None, None, "indices[0] = 9 is not in [0, 5)")


class Patient:
    def __init__(self, limit: int = 2) -> None:
        self.told: list[tuple[DeviceState, str]] = []
        self.health = DeviceHealth(limit, lambda state, error: self.told.append((state, error)))

    def states(self, *outcomes: Exception | None) -> list[DeviceState]:
        for outcome in outcomes:
            if outcome is None:
                self.health.answered()
            else:
                self.health.raised(outcome, None)
        return [state for state, _ in self.told]


@pytest.mark.parametrize(
    ("outcomes", "states"),
    [
        ([DEVICE], []),
        ([DEVICE, DEVICE], [FAILING]),
        ([DEVICE, None, DEVICE], []),
        ([DEVICE, VALUE, DEVICE], []),
        ([DEVICE, InvalidInputError("the model refused the values"), DEVICE], []),
        ([DEVICE, CancelledError("gone"), DEVICE], [FAILING]),
        ([DEVICE, ValueError("a defect"), DEVICE], [FAILING]),
        ([VALUE] * 9, []),
        ([DEVICE, DEVICE, None], [FAILING, WORKING]),
        ([DEVICE, DEVICE, None, DEVICE, DEVICE], [FAILING, WORKING, FAILING]),
        ([DEVICE] * 4, [FAILING, FAILED]),
        ([DEVICE] * 4 + [None, DEVICE, DEVICE], [FAILING, FAILED]),
    ],
)
def test_failures_in_a_row_are_counted(outcomes: list[Exception | None], states: list[DeviceState]) -> None:
    assert Patient().states(*outcomes) == states


@pytest.mark.parametrize("kind", [tf.errors.InternalError, tf.errors.UnknownError, tf.errors.AbortedError])
def test_what_the_runtime_raises_for_a_device_counts(kind: type[tf.errors.OpError]) -> None:
    assert Patient(limit=1).states(kind(None, None, "gone")) == [FAILING]


def test_the_error_is_told_in_a_line() -> None:
    patient = Patient(limit=1)
    patient.states(DEVICE)
    assert patient.told == [(FAILING, "InternalError: CUDA_ERROR_ILLEGAL_ADDRESS")]


def raising(error: Exception) -> Callable[[], None]:
    def trial() -> None:
        raise error

    return trial


@pytest.mark.parametrize(
    ("trial", "states"),
    [(lambda: None, []), (raising(VALUE), []), (raising(DEVICE), [FAILING]), (None, [FAILING])],
    ids=["succeeds", "refuses its values", "fails, too", "is the run itself"],
)
def test_the_error_of_a_run_on_a_callers_values_counts_if_a_trial_fails_too(
    trial: Callable[[], None] | None, states: list[DeviceState]
) -> None:
    patient = Patient()
    for _ in range(3):
        patient.health.raised(DEVICE, trial)

    assert [state for state, _ in patient.told] == states
