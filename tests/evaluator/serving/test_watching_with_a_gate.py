"""The watcher with a gate: what is served before and after its decision."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from testkit.text_lifecycle import WAIT_SECONDS
from testkit.watcher_harness import WatcherHarness
from understudy.evaluator.types import EvaluationOutcome

SCORED = EvaluationOutcome.SCORED

pytestmark = pytest.mark.usefixtures("logical_cpus")

ACCEPTED, REFUSED = EvaluationOutcome.ACCEPTED, EvaluationOutcome.REFUSED


def test_a_gate_lets_nothing_serving_before_its_score_has_passed(make_harness: Callable[..., WatcherHarness]) -> None:
    harness = make_harness(min_value=0.5)
    harness.lifecycle.publish(1)
    harness.reconcile()
    assert harness.serving_step() is None
    harness.evaluate_next(loss=0.6)
    harness.reconcile()
    assert harness.serving_step() is None
    harness.lifecycle.publish(2)
    harness.reconcile()
    harness.evaluate_next(loss=0.5)
    harness.reconcile()

    assert harness.serving_step() == 2
    assert harness.entries() == [(1, SCORED), (1, REFUSED), (2, SCORED), (2, ACCEPTED)]
    refused, accepted = harness.ledger.page()[1::2]
    assert refused.reason == "loss is 0.6; at most 0.5 is required"
    assert refused.metrics == {"value": 0.6, "min_value": 0.5}
    assert accepted.reason == "loss is 0.5"


def test_a_refused_checkpoint_is_recorded_with_the_numbers_compared(
    make_harness: Callable[..., WatcherHarness],
) -> None:
    harness = make_harness(min_improvement=0.125)
    for step, loss in ((1, 1.0), (2, 0.9375), (3, 0.875), (4, float("nan"))):
        harness.lifecycle.publish(step)
        harness.reconcile()
        harness.evaluate_next(loss)
        harness.reconcile()

    assert harness.serving_step() == 3
    decisions = [record for record in harness.ledger.page() if record.outcome is not SCORED]
    assert [(record.step, record.outcome) for record in decisions] == [
        (1, ACCEPTED),
        (2, REFUSED),
        (3, ACCEPTED),
        (4, REFUSED),
    ]
    assert decisions[1].metrics == {
        "value": 0.9375,
        "serving_value": 1.0,
        "improvement": 0.0625,
        "min_improvement": 0.125,
    }
    assert "0.0625 better than the 1.0 of the serving step 1; 0.125 is required" in decisions[1].reason
    assert decisions[3].reason == "loss is nan; finite numbers are required"


def test_after_a_restart_what_was_admitted_is_served_and_what_was_not_decided_is(
    make_harness: Callable[..., WatcherHarness],
) -> None:
    harness = make_harness(min_improvement=0.25)
    harness.lifecycle.publish(1, 2)
    harness.reconcile()
    harness.evaluate_next(loss=1.0)
    harness.reconcile()
    harness.evaluate_next(loss=0.9)  # the process ends before the gate has decided on it
    harness.close()

    again = make_harness(min_improvement=0.25)
    again.lifecycle.publish()
    again.reconcile()
    again.reconcile()
    assert again.serving_step() == 1
    assert again.entries() == [(1, SCORED), (1, ACCEPTED), (2, SCORED), (2, REFUSED)]


def test_a_pin_goes_before_the_gate(make_harness: Callable[..., WatcherHarness]) -> None:
    harness = make_harness(min_value=0.5)
    harness.lifecycle.publish(1)
    harness.reconcile()
    harness.evaluate_next(loss=0.6)
    harness.controller.pin(1).result(WAIT_SECONDS)
    harness.reconcile()
    assert harness.serving_step() == 1
