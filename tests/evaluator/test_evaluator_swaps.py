from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from testkit.real_run import (
    FEATURES,
    GOAL,
    WAIT_SECONDS,
    RealRun,
    dataset,
    rows,
    step_model,
    until_served,
    wait_for_records,
)
from understudy.evaluator.evaluator import Evaluator
from understudy.evaluator.evaluator_errors import InvalidInputError, ModelChangedError
from understudy.evaluator.model import frozen
from understudy.evaluator.types import Batch, EvaluationResult

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("logical_cpus")]


@pytest.fixture
def run(tmp_path: Path) -> RealRun:
    return RealRun(tmp_path)


FROZEN = "Predict uses constants for the weights"


class LoadGenerator:
    """Threads that predict without pause, and check that each answer belongs wholly to the step it names."""

    def __init__(self, evaluator: Evaluator, threads: int) -> None:
        self._evaluator = evaluator
        self._changed = threading.Condition()
        self._stopping = False
        self._threads = [threading.Thread(target=self._run, args=(place,)) for place in range(threads)]
        self.answers: dict[int, int] = {}
        self.failures: list[BaseException] = []

    @contextmanager
    def at_work(self) -> Iterator[LoadGenerator]:
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self._stopping = True
            for thread in self._threads:
                thread.join(WAIT_SECONDS)
        assert not any(thread.is_alive() for thread in self._threads)

    def wait_for(self, happened: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.failures or happened(), WAIT_SECONDS * 2)
        assert self.failures == []

    def total(self) -> int:
        return sum(self.answers.values())

    def _run(self, place: int) -> None:
        count = 1 + 2 * place
        try:
            while not self._stopping:
                self._predict(count)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            with self._changed:
                self.failures.append(error)
                self._changed.notify_all()

    def _predict(self, count: int) -> None:
        prediction = self._evaluator.predict(rows(count, value=1.0)).result(WAIT_SECONDS)
        expected = np.full((count, FEATURES), prediction.step * (1.0 + FEATURES), np.float32)
        np.testing.assert_array_equal(prediction.outputs["y"], expected)
        with self._changed:
            self.answers[prediction.step] = self.answers.get(prediction.step, 0) + 1
            self._changed.notify_all()


@pytest.fixture
def frozen_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freeze every version as soon as it is serving, whatever it gains."""
    monkeypatch.setattr("understudy.evaluator.assembly.serving_parts.SETTLING_SECONDS", 0.0)
    monkeypatch.setattr(frozen, "MIN_GAIN", 0.0)
    monkeypatch.setattr(frozen, "MIN_GAIN_OF_EACH", 0.0)
    monkeypatch.setattr(frozen, "_TIMED_SECONDS", 0.0)


@pytest.mark.usefixtures("frozen_at_once")
def test_predictions_while_versions_are_frozen_and_swapped_all_belong_to_one_step(run: RealRun) -> None:
    run.publish(1)
    with run.running() as evaluator, LoadGenerator(evaluator, threads=2).at_work() as load_generator:
        for step in range(2, 8):
            run.publish(step)
            load_generator.wait_for(lambda step=step: step in load_generator.answers)  # type: ignore[misc]
            if step % 2:  # the others are cancelled by the next, or just done
                load_generator.wait_for(lambda: evaluator.metadata().notes[-1] == FROZEN)
                wanted = load_generator.answers[step] + 10
                load_generator.wait_for(
                    lambda step=step, wanted=wanted: load_generator.answers[step] >= wanted  # type: ignore[misc]
                )
        assert load_generator.failures == []
        assert run.told.rejections == []
        assert "failed" not in run.told.freezings


@pytest.mark.usefixtures("frozen_at_once")
def test_a_version_that_may_take_no_memory_for_constants_is_served_with_variables(run: RealRun) -> None:
    run.publish(1)
    with run.running(frozen_memory_mib=0) as evaluator, LoadGenerator(evaluator, threads=1).at_work() as load_generator:
        load_generator.wait_for(lambda: load_generator.total() > 50)
        assert evaluator.metadata().notes[-1].startswith("Predict uses variables for the weights")
    assert run.told.freezings == []


def test_rollbacks_and_pins_under_load_lose_nothing(run: RealRun) -> None:
    run.publish(1, 2, 3)
    with run.running() as evaluator, LoadGenerator(evaluator, threads=2).at_work() as load_generator:
        for step in (2, 1, 3, 1, 2):
            assert evaluator.pin(step).result(WAIT_SECONDS).serving_step == step
            before = load_generator.answers.get(step, 0)
            load_generator.wait_for(lambda step=step, before=before: load_generator.answers.get(step, 0) > before)  # type: ignore[misc]
        for step in (1, 3):
            assert evaluator.roll_back().result(WAIT_SECONDS).serving_step == step
        assert load_generator.failures == []


def test_evaluations_of_three_versions_at_once_equal_their_own_scores(run: RealRun) -> None:
    run.publish(1, 2, 6)
    results: dict[int, list[EvaluationResult]] = {1: [], 2: [], 6: []}

    def score(evaluator: Evaluator, step: int) -> None:
        with evaluator.open_stream(version=step).result(WAIT_SECONDS) as stream:
            for count in (3, 16, 1, 40):
                targets = np.full((count, FEATURES), GOAL, np.float32)
                stream.add(Batch(inputs=rows(count), targets={"targets": targets})).result(WAIT_SECONDS)
            results[step].append(stream.finish())

    with run.running() as evaluator, LoadGenerator(evaluator, threads=2).at_work() as load_generator:
        threads = [threading.Thread(target=score, args=(evaluator, step)) for step in (1, 2, 6, 1, 2, 6, 1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_SECONDS)
        assert load_generator.failures == []

    assert [len(scored) for scored in results.values()] == [3, 3, 2]
    for step, scored in results.items():
        assert all(result.metrics == {"loss": (step - GOAL) ** 2, "mae": abs(step - GOAL)} for result in scored)
        assert all((result.step, result.examples) == (step, 60) for result in scored)


def lease_up(evaluator: Evaluator) -> threading.Event:
    """Keep the device busy until the event is set."""
    is_busy, may_go_on = threading.Event(), threading.Event()

    def work() -> None:
        is_busy.set()
        may_go_on.wait(WAIT_SECONDS)

    evaluator._components.engine.run(work, examples=1)
    assert is_busy.wait(WAIT_SECONDS)
    return may_go_on


def test_requests_that_wait_while_the_model_changes_run_on_it_or_hear_what_it_takes(run: RealRun) -> None:
    run.publish(1)
    with run.running() as evaluator:
        may_go_on = lease_up(evaluator)
        try:
            narrow = [evaluator.predict(rows(count, value=1.0)) for count in (1, 2)]
            run.publish(2, model=step_model(2, features=FEATURES + 1))
            until_served(evaluator, 2)
            wide = evaluator.predict({"x": np.ones((2, FEATURES + 1), np.float32)})
            with pytest.raises(InvalidInputError, match=r"\[2, 3\]; \[examples, 4\] was expected"):
                evaluator.predict(rows(2))
        finally:
            may_go_on.set()
        for future in narrow:
            with pytest.raises(
                ModelChangedError, match=r"from step 1 to step 2 .* now takes 'x' float32 \[examples, 4\]: "
            ):
                future.result(WAIT_SECONDS)
        np.testing.assert_array_equal(wide.result(WAIT_SECONDS).outputs["y"], np.full((2, FEATURES), 10.0))


def test_requests_that_wait_while_the_architecture_changes_but_not_the_inputs_run_on_the_new_one(run: RealRun) -> None:
    run.publish(1)
    with run.running() as evaluator:
        may_go_on = lease_up(evaluator)
        try:
            waiting = [evaluator.predict(rows(count, value=1.0)) for count in (1, 2)]
            run.publish(2, model=step_model(2, outputs=1, deeper=True))
            until_served(evaluator, 2)
        finally:
            may_go_on.set()
        for count, future in enumerate(waiting, start=1):
            np.testing.assert_array_equal(future.result(WAIT_SECONDS).outputs["y"], np.full((count, 1), 8.0))


def test_predictions_never_fail_while_architectures_with_the_same_inputs_take_turns(run: RealRun) -> None:
    run.publish(1)
    with run.running() as evaluator, LoadGenerator(evaluator, threads=3).at_work() as load_generator:
        for step in range(2, 8):
            run.publish(step, model=step_model(step, deeper=step % 2 == 0))
            load_generator.wait_for(lambda step=step: step in load_generator.answers)  # type: ignore[misc]

        assert run.told.rejections == []


def test_checkpoints_are_evaluated_while_predictions_flow(run: RealRun) -> None:
    run.publish(1)
    with (
        run.running(datasets=[dataset(rows=50)]) as evaluator,
        LoadGenerator(evaluator, threads=3).at_work() as load_generator,
    ):
        run.publish(*range(2, 8))
        records = wait_for_records(evaluator, 7)
        assert load_generator.failures == []

    assert [record.step for record in records] == list(range(1, 8))
    assert [record.metrics["loss"] for record in records] == [(step - GOAL) ** 2 for step in range(1, 8)]
