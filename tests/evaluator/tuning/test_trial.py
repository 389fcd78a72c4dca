"""A trial measures a model in a process of its own, which never outlives its purpose."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import keras
import pytest

from understudy.evaluator.evaluator_errors import TrialError
from understudy.evaluator.tuning.choice import SIZES, Threads, choose
from understudy.evaluator.tuning.trial import TrialRequest, run_trial

MOST_SECONDS = 100.0


@pytest.fixture(scope="module")
def request_of_a_tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TrialRequest:
    model_file = tmp_path_factory.mktemp("model") / "model.keras"
    keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]).save(model_file)
    return TrialRequest(
        model_file=str(model_file),
        kind="keras",
        experiment=None,
        allow_unsafe_models=False,
        devices=(),
        logical_cpus=None,
        frozen_memory_mib=64,
        threads=Threads(intra_op=1, inter_op=1),
    )


def test_a_trial_measures_the_calls_of_a_model(request_of_a_tiny_model: TrialRequest) -> None:
    measured = run_trial(request_of_a_tiny_model, lambda: True, timeout_seconds=MOST_SECONDS)

    assert measured is not None
    assert measured.threads == Threads(intra_op=1, inter_op=1)
    assert list(measured.calls) == list(SIZES[: len(measured.calls)])
    assert all(0 < call.wall_seconds < MOST_SECONDS and call.cpu_seconds > 0 for call in measured.calls.values())
    assert choose([measured], cores=2).threads == measured.threads


def test_a_trial_that_is_not_wanted_ends_at_once(request_of_a_tiny_model: TrialRequest) -> None:
    began = time.monotonic()

    assert run_trial(request_of_a_tiny_model, lambda: False, timeout_seconds=MOST_SECONDS) is None
    assert time.monotonic() - began < 5.0, "it takes longer to import TensorFlow"


def test_a_trial_that_takes_too_long_is_ended(request_of_a_tiny_model: TrialRequest) -> None:
    with pytest.raises(TrialError, match="more than 0 s"):
        run_trial(request_of_a_tiny_model, lambda: True, timeout_seconds=0.01)


def test_a_trial_of_a_missing_model_says_why_it_failed(request_of_a_tiny_model: TrialRequest, tmp_path: Path) -> None:
    request = replace(request_of_a_tiny_model, model_file=str(tmp_path / "none.keras"))
    with pytest.raises(TrialError, match=r"the trial failed: .*none\.keras"):
        run_trial(request, lambda: True, timeout_seconds=MOST_SECONDS)
