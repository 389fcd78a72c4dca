"""Which real checkpoint is served, by its score."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import pytest

from testkit.in_process import until
from testkit.real_run import (
    GOAL,
    WAIT_SECONDS,
    RealRun,
    dataset,
    outcomes,
    predicted_step,
    rows,
    step_model,
    wait_for_records,
)
from understudy.evaluator.evaluator_errors import ConfigurationError, LedgerError
from understudy.evaluator.records.ledger import Ledger
from understudy.evaluator.types import EvaluationOutcome, EvaluationRecord

SCORED, ACCEPTED, REFUSED = EvaluationOutcome.SCORED, EvaluationOutcome.ACCEPTED, EvaluationOutcome.REFUSED

pytestmark = pytest.mark.usefixtures("logical_cpus")


@pytest.fixture
def run(tmp_path: Path) -> RealRun:
    return RealRun(tmp_path)


def test_behind_a_gate_only_what_is_better_by_enough_starts_serving(run: RealRun) -> None:
    run.publish(1)
    with run.running(datasets=[dataset()], min_value=10.0, min_improvement=4.0) as evaluator:
        wait_for_records(evaluator, 2)
        run.publish(3)
        wait_for_records(evaluator, 4)
        run.publish(5)
        wait_for_records(evaluator, 6)
        run.publish(8)
        records = wait_for_records(evaluator, 8)

        assert outcomes(records) == [
            *((1, "test", SCORED), (1, "test", ACCEPTED)),
            *((3, "test", SCORED), (3, "test", ACCEPTED)),
            *((5, "test", SCORED), (5, "test", REFUSED)),
            *((8, "test", SCORED), (8, "test", REFUSED)),
        ]
        assert records[5].metrics == {
            "value": 1.0,
            "min_value": 10.0,
            "serving_value": 1.0,
            "improvement": 0.0,
            "min_improvement": 4.0,
        }
        assert records[7].reason == f"loss is {(8 - GOAL) ** 2}; at most 10.0 is required"
        assert predicted_step(evaluator) == 3
        until(lambda: [told.outcome for told in run.told.records] == [record.outcome for record in records])

    with run.running(datasets=[dataset()], min_value=10.0, min_improvement=4.0) as evaluator:
        assert predicted_step(evaluator) == 3
        assert len(evaluator.ledger.page()) == 8


def test_a_checkpoint_whose_loss_is_no_number_does_not_stay_serving(run: RealRun) -> None:
    run.publish(1)
    with run.running(datasets=[dataset()]) as evaluator:
        wait_for_records(evaluator, 1)
        run.publish(2, model=not_a_number())
        records = wait_for_records(evaluator, 2)
        assert math.isnan(records[1].metrics["loss"])
        run.publish(3)
        wait_for_records(evaluator, 3)
        until(lambda: evaluator.best_step == 3)
        assert evaluator.predict(rows()).result(WAIT_SECONDS).step == 3


def not_a_number() -> object:
    model = step_model(2)
    model.set_weights([weight * math.nan for weight in model.get_weights()])
    return model


def test_a_gate_needs_a_dataset(run: RealRun) -> None:
    with pytest.raises(ConfigurationError, match="there is no dataset to score on"):
        run.evaluator(min_value=1.0).start()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"evaluation_policy": 0}, "evaluation_policy is 0"),
        ({"evaluation_policy": "some"}, "evaluation_policy is 'some'"),
        ({"min_value": math.nan}, "min_value is nan"),
        ({"min_improvement": -1.0}, "min_improvement is -1.0"),
        ({"min_improvement": 1.0, "version_policy": 3}, "min_improvement goes with version_policy latest or best"),
    ],
)
def test_settings_that_make_no_sense_are_refused(run: RealRun, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        run.evaluator(**settings)


def test_a_full_disk_under_the_ledger_puts_the_evaluation_off_and_loses_nothing(
    run: RealRun, caplog: pytest.LogCaptureFixture
) -> None:
    run.publish(1)
    with run.running(datasets=[dataset()]) as evaluator:
        wait_for_records(evaluator, 1)
        fill(evaluator.ledger)
        entries = len(evaluator.ledger.page(limit=1_000_000))
        run.publish(2)
        until(lambda: "evaluation put off" in caplog.text)
        assert predicted_step(evaluator) == 2
        assert len(evaluator.ledger.page(limit=1_000_000)) == entries
        evaluator.ledger._connection.execute("PRAGMA max_page_count = 1000000")
        until(lambda: evaluator.last_sequence > entries)
        (record,) = evaluator.ledger.page(after_sequence=entries)

        assert outcomes([record]) == [(2, "test", SCORED)]


def fill(ledger: Ledger) -> None:
    """Leave no room for another entry."""
    (pages,) = ledger._connection.execute("PRAGMA page_count").fetchone()
    ledger._connection.execute(f"PRAGMA max_page_count = {pages}")
    with contextlib.suppress(LedgerError):
        for step in range(1_000_000, 2_000_000):
            ledger.append(
                EvaluationRecord(step=step, checkpoint_digest="d", dataset="other", outcome=EvaluationOutcome.SKIPPED)
            )
