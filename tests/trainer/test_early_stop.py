"""What a training makes of an evaluator's results. The results are files like those the evaluator publishes."""

from __future__ import annotations

import io
import json
from pathlib import Path

import keras
import numpy as np
import pytest

from testkit.training_harness import Linear, cluster, run
from understudy.checkpoints import RunDir, read_manifest, read_training_status
from understudy.evaluator.records.result_files import ResultFiles
from understudy.evaluator.types import EvaluationOutcome, EvaluationRecord
from understudy.trainer import (
    EvaluationStopping,
    EvaluationTimeoutError,
    JsonLinesReporter,
    StopRuleError,
    TrainSettings,
)
from understudy.trainer.leaving import wait_for_evaluation
from understudy.trainer.stopping import StopMode

pytestmark = pytest.mark.long


def publish(run_dir: Path, *losses: float, settled: bool = True, digest: str = "d") -> None:
    """Publish results of steps 1, 2, ... as an evaluator does."""
    state = RunDir(run_dir).evaluator
    state.mkdir(parents=True, exist_ok=True)
    files = ResultFiles(state / "results")
    for step, loss in enumerate(losses, start=1):
        record = EvaluationRecord(
            sequence=step,
            step=step,
            checkpoint_digest=digest,
            dataset="test",
            outcome=EvaluationOutcome.SCORED,
            metrics={"loss": loss},
        )
        files.publish(step, [record], settled=settled)


def test_training_stops_at_the_checkpoint_at_which_scores_no_longer_improve(tmp_path: Path) -> None:
    publish(tmp_path, 1.0, 2.0, 3.0)
    events = io.StringIO()

    result = run(Linear(), tmp_path, stop_when="test/loss:2", progress=JsonLinesReporter(events))

    assert (result.step, result.stopped_early) == (5, True)
    assert RunDir(tmp_path).committed_steps() == [5]
    assert read_manifest(RunDir(tmp_path).checkpoint(5)).final
    status = read_training_status(RunDir(tmp_path), now=0)
    assert status is not None
    assert (status.state, status.final_step) == ("finished", 5)
    told = [json.loads(line) for line in events.getvalue().splitlines()]
    (stopped,) = [event for event in told if event["event"] == "stopped"]
    assert stopped["reason"] == "test/loss has not improved in 2 evaluations; the best is 1 at step 1"
    assert [event["event"] for event in told[-3:]] == ["stopped", "published", "finished"]

    again = run(Linear(), tmp_path, stop_when="test/loss:2")
    assert (again.first_step, again.step, again.stopped_early) == (5, 5, True)


def test_training_goes_on_while_scores_improve_or_are_missing(tmp_path: Path) -> None:
    publish(tmp_path, 3.0, 2.0, 2.5)

    result = run(Linear(), tmp_path, stop_when="test/loss:2")

    assert (result.step, result.stopped_early) == (10, False)


def test_a_rule_that_names_what_is_not_scored_ends_training_with_a_sentence(tmp_path: Path) -> None:
    publish(tmp_path, 3.0)

    with pytest.raises(StopRuleError, match="'test' has no metric 'lass'; it has loss"):
        run(Linear(), tmp_path, stop_when="test/lass:2", stop_mode="min")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"stop_when": "loss"}, "stop_when is 'loss'; give DATASET/METRIC:N"),
        ({"stop_when": "test/auc:3"}, "stop_when is 'test/auc:3'; say with stop_mode"),
        ({"stop_mode": "min"}, "stop_mode goes with stop_when"),
        ({"wait_for_evaluation": 0.0}, "wait_for_evaluation is a positive time"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path: Path, settings: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TrainSettings(run_dir=tmp_path, steps=1, **settings)  # type: ignore[arg-type] # of several types


def test_all_workers_stop_at_the_same_step(tmp_path: Path) -> None:
    publish(tmp_path, 1.0, 2.0)
    options = ("--steps", "40", "--checkpoint-every", "10", "--stop-when", "test/loss:1", "--no-tensorboard")

    with cluster("Linear", tmp_path, *options) as (chief, worker):
        assert (chief.end(), worker.end()) == (0, 0), chief.errors + worker.errors

    assert "stopping early at step 10" in "".join(chief.lines)
    assert [task.lines[-1] for task in (chief, worker)] == ["finished at step 10\n"] * 2
    assert RunDir(tmp_path).committed_steps() == [10]


def test_asynchronous_training_stops_early_too_and_all_its_tasks_end(tmp_path: Path) -> None:
    publish(tmp_path, 1.0, 2.0)
    endless = ("--steps", "1000000", "--checkpoint-every", "20", "--no-tensorboard")
    roles = ("chief", "worker", "ps")

    options = (*endless, "--stop-when", "test/loss:1")
    with cluster("Linear", tmp_path, *options, roles=roles, strategy="parameter_server") as tasks:
        assert [task.end() for task in tasks] == [0, 0, 0], [task.errors for task in tasks]

    run_dir = RunDir(tmp_path)
    last = run_dir.committed_steps()[-1]
    assert f"stopping early at step {last}" in "".join(tasks[0].lines)
    assert read_manifest(run_dir.checkpoint(last)).final
    status = read_training_status(run_dir, now=0)
    assert status is not None
    assert (status.state, status.final_step) == ("finished", last)


def test_the_end_of_training_waits_for_the_evaluation_of_the_last_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(EvaluationTimeoutError, match=r"step 2 was not evaluated within 0\.01 s"):
        run(Linear(), tmp_path, steps=2, wait_for_evaluation=0.01)

    status = read_training_status(RunDir(tmp_path), now=0)
    assert status is not None
    assert status.state == "finished"
    publish(tmp_path, 2.0, 1.0, digest=read_manifest(RunDir(tmp_path).checkpoint(2)).digest)
    assert run(Linear(), tmp_path, steps=2, wait_for_evaluation=0.01).step == 2


def test_only_a_settled_result_of_the_same_model_ends_the_wait(tmp_path: Path) -> None:
    now = 0.0
    states = iter([{"digest": "other"}, {"digest": "d", "settled": False}, {"digest": "d"}])

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        publish(tmp_path, 1.0, **next(states))  # type: ignore[arg-type] # of several types

    state_dir = RunDir(tmp_path).evaluator
    result = wait_for_evaluation(state_dir, step=1, digest="d", timeout_seconds=100, clock=lambda: now, sleep=sleep)

    assert result.scores == {"test": {"loss": 1.0}}
    assert next(states, None) is None


def test_the_callback_stops_fit_by_the_evaluators_scores(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    stopping = EvaluationStopping("test/loss", patience=1, state_dir=RunDir(tmp_path).evaluator)
    publishing = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, _: publish(tmp_path, *([1.0, 2.0] if epoch == 2 else [1.0]))
    )

    x = np.zeros((4, 1), np.float32)
    history = model.fit(x, x, epochs=10, verbose=0, callbacks=[publishing, stopping])

    assert len(history.epoch) == 3
    assert stopping.reason == "test/loss has not improved in 1 evaluations; the best is 1 at step 1"


@pytest.mark.parametrize(
    ("monitor", "patience", "mode", "words"),
    [
        ("loss", 1, None, "monitor is 'loss'; give DATASET/METRIC"),
        ("test/loss", 0, None, "patience is 0; give a number of evaluations from 1 up"),
        ("test/auc", 1, None, "mode is missing; say whether"),
    ],
)
def test_the_callback_refuses_a_rule_it_cannot_read(
    tmp_path: Path, monitor: str, patience: int, mode: StopMode | None, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        EvaluationStopping(monitor, patience=patience, mode=mode, state_dir=tmp_path)
