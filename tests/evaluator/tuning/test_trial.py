"""A trial measures a model in a process of its own, which never outlives its purpose."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import keras
import psutil
import pytest

from testkit.in_process import until
from understudy.evaluator.evaluator_errors import TrialError
from understudy.evaluator.tuning.choice import SIZES, CallCost, Threads, choose
from understudy.evaluator.tuning.trial import TrialRequest, gains_of_two, run_trial

pytestmark = pytest.mark.long

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
    assert list(measured.gains_of_two) == [], "its batches are brief"
    assert choose([measured], cores=2).threads == measured.threads


def test_a_trial_that_is_not_wanted_ends_at_once(request_of_a_tiny_model: TrialRequest) -> None:
    answers = iter([False, False])

    assert run_trial(request_of_a_tiny_model, lambda: next(answers), timeout_seconds=MOST_SECONDS) is None


def test_a_trial_ends_with_the_processes_that_its_experiment_started(
    request_of_a_tiny_model: TrialRequest, tmp_path: Path
) -> None:
    noted = tmp_path / "noted"
    experiment = tmp_path / "forking.py"
    experiment.write_text(
        "import os, pathlib, time\n"
        "if not (child := os.fork()):\n"
        f"    time.sleep({MOST_SECONDS})\n"
        "    os._exit(0)\n"
        f"pathlib.Path({str(noted)!r} + '.new').write_text(str(child))\n"
        f"os.rename({str(noted)!r} + '.new', {str(noted)!r})\n"
        f"time.sleep({MOST_SECONDS})\n",
        encoding="utf-8",
    )
    request = replace(request_of_a_tiny_model, experiment=f"{experiment}:none")

    assert run_trial(request, lambda: not noted.exists(), timeout_seconds=MOST_SECONDS / 2) is None

    child = int(noted.read_text(encoding="utf-8"))
    until(lambda: not is_running(child))


def is_running(process: int) -> bool:
    """Whether a process exists and is not a zombie."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    return False


def test_a_trial_that_takes_too_long_is_ended(request_of_a_tiny_model: TrialRequest) -> None:
    with pytest.raises(TrialError, match="more than 0 s"):
        run_trial(request_of_a_tiny_model, lambda: True, timeout_seconds=0.01)


def test_a_trial_of_a_missing_model_says_why_it_failed(request_of_a_tiny_model: TrialRequest, tmp_path: Path) -> None:
    request = replace(request_of_a_tiny_model, model_file=str(tmp_path / "none.keras"))
    with pytest.raises(TrialError, match=r"the trial failed: .*none\.keras"):
        run_trial(request, lambda: True, timeout_seconds=MOST_SECONDS)


@pytest.mark.parametrize(
    "seconds", [{1: 0.06, 2: 0.12, 8: 2.0}, {1: 0.09, 2: 0.09, 8: 0.1, 32: 0.4}, {1: 1e-5, 32: 1e-4}]
)
def test_a_model_is_not_tried_with_two_batches_where_they_take_too_long_or_no_time(seconds: dict[int, float]) -> None:
    calls = {size: CallCost(wall_seconds=each, cpu_seconds=each) for size, each in seconds.items()}
    assert gains_of_two(None, calls) == []
