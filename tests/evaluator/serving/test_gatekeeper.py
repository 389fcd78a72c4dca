"""Gates at a confidence over a ledger: decided once, with three outcomes, also over restarts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from testkit.text_lifecycle import WAIT_SECONDS
from testkit.watcher_harness import DATASET, WatcherHarness
from understudy.evaluator.datasets.dataset import ArrayDataset
from understudy.evaluator.evaluator_errors import ConfigurationError
from understudy.evaluator.types import Array, EvaluationOutcome, EvaluationRecord, SliceScore

SCORED, ACCEPTED, REFUSED = EvaluationOutcome.SCORED, EvaluationOutcome.ACCEPTED, EvaluationOutcome.REFUSED
UNDECIDED = EvaluationOutcome.UNDECIDED

GATE = ("test/loss not worse by 0.1 at 95%",)
BIG = ArrayDataset("big", {"x": np.zeros((9, 1), np.float32), "y": np.zeros(9, np.float32)})

Make = Callable[..., WatcherHarness]

pytestmark = pytest.mark.usefixtures("logical_cpus")


def around(loss: float, spread: float = 0.0) -> Array:
    """Return the resamples of a loss whose difference from a constant spreads this far to either side."""
    return np.linspace(loss - spread, loss + spread, 201)


def step(
    harness: WatcherHarness,
    number: int,
    loss: float,
    *,
    spread: float = 0.0,
    resampled: bool = True,
    undefined: str = "",
    **details: Any,
) -> None:
    """Publish a checkpoint, score it on the first dataset, and have the gate decide."""
    harness.lifecycle.publish(number)
    harness.reconcile()
    info = harness.backlog.next()
    assert info is not None
    assert info.step == number
    harness.score(info, loss, resampled=around(loss, spread) if resampled else None, undefined=undefined, **details)
    harness.backlog.finished()
    harness.reconcile()


def score_further(harness: WatcherHarness, loss: float, *, spread: float = 0.0) -> int:
    """Score the next checkpoint that waits on the further dataset."""
    info = harness.backlog.next()
    assert info is not None
    assert [dataset.name for dataset in harness.recorder.remaining(*info.key)] == ["big"]
    harness.score(info, loss, dataset=BIG, resampled=around(loss, spread))
    harness.backlog.finished()
    return info.step


def test_the_interval_of_the_difference_decides_and_is_recorded(make_harness: Make) -> None:
    harness = make_harness(gate=GATE)
    step(harness, 1, 1.0)
    step(harness, 2, 1.05, spread=0.02)
    step(harness, 3, 1.25, spread=0.02)
    step(harness, 4, 1.12, spread=0.2)

    decisions = [record for record in harness.ledger.page() if record.outcome is not SCORED]
    assert [(record.step, record.outcome) for record in decisions] == [
        (1, ACCEPTED),
        (2, ACCEPTED),
        (3, REFUSED),
        (4, UNDECIDED),
    ]
    assert harness.serving_step() == 2
    first, second, third, fourth = (record.conditions[0] for record in decisions)
    assert (first.baseline_step, first.interval) == (None, None)
    assert second.interval is not None
    assert (second.interval.low, second.interval.high) == pytest.approx((0.031, 0.069), abs=1e-6)
    assert (third.text, third.value, third.baseline_step, third.baseline_value) == (GATE[0], 1.25, 2, 1.05)
    assert fourth.outcome is UNDECIDED
    assert decisions[3].reason == (
        "test/loss is 1.12, 0.07 worse than the 1.05 of the serving step 2; the improvement is between -0.241 and "
        "0.101 at 95%; at least -0.1 is required"
    )


def test_an_undecided_checkpoint_is_served_if_the_settings_say_so(make_harness: Make) -> None:
    harness = make_harness(gate=GATE, when_undecided="serve")
    step(harness, 1, 1.0)
    step(harness, 2, 1.1, spread=0.2)

    assert harness.entries()[-1] == (2, UNDECIDED)
    assert harness.serving_step() == 2


@pytest.mark.parametrize("gate", [GATE[0], "test/loss not worse by 0.1", "test/loss better by 0.1"])
def test_a_checkpoint_is_undecided_while_its_value_or_that_of_the_baseline_is_undefined(
    make_harness: Make, gate: str, caplog: pytest.LogCaptureFixture
) -> None:
    harness = make_harness(gate=(gate,), when_undecided="serve")
    step(harness, 1, 0.0, undefined="no example counts")
    step(harness, 2, 1.0)

    own, other = [record for record in harness.ledger.page() if record.outcome is not SCORED]
    assert (own.outcome, own.reason) == (UNDECIDED, "loss of 'test' is undefined: no example counts")
    assert (other.outcome, other.reason) == (UNDECIDED, f"of step 1, {own.reason}")
    assert (other.conditions[0].value, other.conditions[0].baseline_step) == (1.0, 1)
    (warning,) = [record.__dict__ for record in caplog.records if "cannot be decided" in record.message]
    assert (warning["gate"], warning["step"], warning["reason"]) == (gate, 1, own.reason)


def test_an_operator_may_promote_an_undecided_checkpoint(make_harness: Make) -> None:
    harness = make_harness(gate=GATE)
    step(harness, 1, 1.0)
    step(harness, 2, 1.1, spread=0.2)
    assert harness.serving_step() == 1

    harness.controller.pin(2).result(WAIT_SECONDS)
    harness.reconcile()
    assert harness.serving_step() == 2


def test_of_several_versions_the_best_is_compared_with_where_the_gate_says_so(make_harness: Make) -> None:
    harness = make_harness(gate=("test/loss not worse by 0.2", "test/loss not worse by 0.25 than best"))
    for number, loss in ((1, 1.0), (2, 1.15), (3, 1.3)):
        step(harness, number, loss)

    (*_, refused) = harness.ledger.page()
    assert (refused.step, refused.outcome) == (3, REFUSED)
    assert [(each.outcome, each.baseline_step) for each in refused.conditions] == [(ACCEPTED, 2), (REFUSED, 1)]
    assert "of the best step 1; at least -0.25 is required" in refused.reason


def test_an_undecided_checkpoint_is_decided_on_another_dataset_that_no_other_is_scored_on(make_harness: Make) -> None:
    harness = make_harness(gate=GATE, when_undecided="big", datasets=(DATASET, BIG))
    step(harness, 1, 1.0)
    step(harness, 2, 1.05, spread=0.2)
    assert harness.entries()[-1] == (2, UNDECIDED)
    assert not harness.watcher.is_caught_up(0.0)
    harness.reconcile()
    assert not harness.watcher.is_caught_up(0.0)
    assert [score_further(harness, 1.0), score_further(harness, 1.02, spread=0.01)] == [1, 2]
    harness.reconcile()
    step(harness, 3, 0.5)

    records = harness.ledger.page()
    assert [(each.step, each.dataset, each.outcome) for each in records] == [
        *((1, "test", SCORED), (1, "test", ACCEPTED), (2, "test", SCORED), (2, "test", UNDECIDED)),
        *((1, "big", SCORED), (2, "big", SCORED), (2, "big", ACCEPTED)),
        *((3, "test", SCORED), (3, "test", ACCEPTED)),
    ]
    assert records[6].conditions[0].baseline_value == 1.0
    assert records[6].conditions[0].value == 1.02
    assert harness.serving_step() == 3


def test_a_checkpoint_that_is_undecided_on_the_other_dataset_too_is_left_at_that(make_harness: Make) -> None:
    harness = make_harness(gate=GATE, when_undecided="big", datasets=(DATASET, BIG))
    step(harness, 1, 1.0)
    step(harness, 2, 1.1, spread=0.2)
    harness.reconcile()
    score_further(harness, 1.0)
    score_further(harness, 1.1, spread=0.1)
    harness.reconcile()
    ended = harness.entries()
    assert [(each.dataset, each.outcome) for each in harness.ledger.page()[-1:]] == [("big", UNDECIDED)]
    harness.close()

    again = make_harness(gate=GATE, when_undecided="big", datasets=(DATASET, BIG))
    again.lifecycle.publish()
    again.reconcile()
    again.reconcile()
    assert again.entries() == ended
    assert again.serving_step() == 1


def test_a_checkpoint_whose_evaluation_on_the_other_dataset_failed_stays_undecided_and_says_so(
    make_harness: Make,
) -> None:
    harness = make_harness(gate=GATE, when_undecided="big", datasets=(DATASET, BIG))
    step(harness, 1, 1.0)
    step(harness, 2, 1.1, spread=0.2)
    harness.reconcile()
    for number in (1, 2):
        info = harness.lifecycle.store.info(number)
        harness.recorder.record_reason(*info.key, EvaluationOutcome.FAILED, "no column", dataset=BIG)
    harness.reconcile()

    last = harness.ledger.page()[-1]
    assert (last.step, last.dataset, last.outcome) == (2, "big", UNDECIDED)
    assert last.reason.endswith("; there is no score on 'big', as that evaluation failed")


def test_killed_before_the_other_dataset_was_scored_it_goes_on_after_the_restart(make_harness: Make) -> None:
    harness = make_harness(gate=GATE, when_undecided="big", datasets=(DATASET, BIG))
    step(harness, 1, 1.0)
    step(harness, 2, 1.05, spread=0.2)
    harness.reconcile()
    score_further(harness, 1.0)
    harness.close()

    again = make_harness(gate=GATE, when_undecided="big", datasets=(DATASET, BIG))
    again.lifecycle.publish()
    again.reconcile()
    again.reconcile()
    assert score_further(again, 1.02, spread=0.01) == 2
    again.reconcile()
    assert [(each.dataset, each.outcome) for each in again.ledger.page()[3:]] == [
        *(("test", UNDECIDED), ("big", SCORED), ("big", SCORED), ("big", ACCEPTED)),
    ]
    assert again.serving_step() == 2


@pytest.mark.parametrize("gate", [GATE, ("test/loss not worse by 0.1",)])
def test_where_there_is_nothing_to_compare_with_missing_resamples_do_not_matter(
    make_harness: Make, gate: tuple[str, ...]
) -> None:
    harness = make_harness(gate=gate)
    step(harness, 1, 1.0, resampled=False)
    (*_, accepted) = harness.ledger.page()
    assert (accepted.outcome, accepted.reason) == (ACCEPTED, "test/loss is 1")


@pytest.mark.parametrize(("gate", "first"), [(GATE[0], ACCEPTED), ("test/loss <= 2 at 95%", UNDECIDED)])
def test_a_model_without_intervals_is_warned_of_once_at_the_first_score_with_what_helps(
    make_harness: Make, caplog: pytest.LogCaptureFixture, gate: str, first: EvaluationOutcome
) -> None:
    harness = make_harness(gate=(gate, "test/loss <= 3"))
    why = "there are no intervals, because the model computes its metrics in a way of its own"
    said = f"step 1 has no resamples of loss; {why}; leave out 'at 95%' to decide by the value alone"
    step(harness, 1, 1.0, resampled=False, notes=("a slice is left out", why))
    (warning,) = [record for record in caplog.records if "cannot be decided" in record.message]
    assert (warning.__dict__["gate"], warning.__dict__["reason"]) == (gate, said)
    step(harness, 2, 1.0, resampled=False, notes=(why,))

    decisions = [record for record in harness.ledger.page() if record.outcome is not SCORED]
    assert [record.outcome for record in decisions] == [first, UNDECIDED]
    assert said in decisions[0].reason
    assert said.replace("step 1", "step 2") in decisions[1].reason
    assert caplog.text.count("cannot be decided") == 1


def test_what_was_undecided_is_so_only_once_after_a_restart_and_decided_when_it_is_scored_anew(
    make_harness: Make,
) -> None:
    harness = make_harness(gate=GATE)
    step(harness, 1, 1.0, resampled=False)
    step(harness, 2, 1.0)
    (*_, undecided) = harness.ledger.page()
    assert undecided.outcome is UNDECIDED
    assert "step 1 has no resamples of loss; score it again with 'understudy rescore --since 1'" in undecided.reason
    harness.close()

    again = make_harness(gate=GATE)
    again.lifecycle.publish()
    again.reconcile()
    assert again.entries() == [(1, SCORED), (1, ACCEPTED), (2, SCORED), (2, UNDECIDED)]
    info = again.lifecycle.store.find(1)
    assert info is not None
    again.ledger.append(
        EvaluationRecord(
            step=1,
            checkpoint_digest=info.digest,
            dataset="test",
            dataset_digest=DATASET.digest,
            outcome=SCORED,
            metrics={"loss": 1.0},
        ),
        scoring_digest="with resamples",
        resampled={"loss": around(1.0)},
    )
    again.reconcile()
    assert again.entries()[-1] == (2, ACCEPTED)
    assert again.serving_step() == 2


def test_killed_between_score_and_decision_it_is_decided_once(make_harness: Make) -> None:
    harness = make_harness(gate=GATE)
    step(harness, 1, 1.0)
    harness.lifecycle.publish(2)
    harness.reconcile()
    info = harness.backlog.next()
    assert info is not None
    harness.score(info, 1.12, resampled=around(1.12, 0.2))
    harness.close()

    for _ in range(2):
        again = make_harness(gate=GATE)
        again.lifecycle.publish()
        again.reconcile()
        assert again.entries() == [(1, SCORED), (1, ACCEPTED), (2, SCORED), (2, UNDECIDED)]
        again.close()


def test_a_baseline_that_was_deleted_still_counts_by_its_score(make_harness: Make) -> None:
    harness = make_harness(gate=("test/loss not worse by 0.1 than best at 95%",), when_undecided="serve", serve="best")
    for number, loss in ((1, 0.5), (2, 1.0)):
        step(harness, number, loss)
    shutil.rmtree(harness.lifecycle.run.checkpoint(1))
    step(harness, 3, 0.55, spread=0.01)

    (*_, decision) = harness.ledger.page()
    assert (decision.outcome, decision.conditions[0].baseline_step) == (ACCEPTED, 1)


def test_conditions_on_two_datasets_are_decided_when_both_are_scored(make_harness: Make) -> None:
    harness = make_harness(gate=(*GATE, "big/loss <= 0.9 at 95%"), datasets=(DATASET, BIG))
    harness.lifecycle.publish(1)
    harness.reconcile()
    info = harness.backlog.next()
    assert info is not None
    harness.score(info, 1.0, resampled=around(1.0))
    harness.reconcile()
    assert harness.entries() == [(1, SCORED)]
    harness.score(info, 0.8, dataset=BIG, resampled=around(0.8, 0.05))
    harness.reconcile()

    (*_, decision) = harness.ledger.page()
    assert (decision.dataset, decision.outcome, len(decision.conditions)) == ("", ACCEPTED, 2)
    interval = decision.conditions[1].interval
    assert interval is not None
    assert (interval.low, interval.high) == pytest.approx((0.7525, 0.8475))
    assert harness.serving_step() == 1


def test_scores_on_other_content_of_a_dataset_are_neither_ranked_nor_compared(make_harness: Make) -> None:
    harness = make_harness(gate=("test/loss <= 1",))
    step(harness, 1, 0.1)
    harness.close()
    changed = ArrayDataset("test", {"x": np.ones((1, 1), np.float32), "y": np.zeros(1, np.float32)})

    again = make_harness(gate=("test/loss <= 1",), datasets=(changed,))
    again.lifecycle.publish(2)
    again.reconcile()
    assert again.ranking.best() is None
    for _ in range(2):
        info = again.backlog.next()
        assert info is not None
        again.score(info, 0.5 + info.step / 10, dataset=changed)
        again.backlog.finished()
    again.reconcile()
    assert again.ranking.best() == 1
    assert again.ranking.value(1) == 0.6
    assert again.entries() == [(1, SCORED), (1, ACCEPTED), (1, SCORED), (2, SCORED), (2, ACCEPTED)]


def test_the_best_on_the_former_examples_is_served_until_it_is_scored_on_the_new_ones(make_harness: Make) -> None:
    harness = make_harness(serve="best")
    for number, loss in ((1, 0.5), (2, 0.1), (3, 0.7)):
        step(harness, number, loss)
    assert harness.serving_step() == 2
    harness.close()
    changed = ArrayDataset("test", {"x": np.ones((1, 1), np.float32), "y": np.zeros(1, np.float32)})

    again = make_harness(serve="best", datasets=(changed,))
    again.lifecycle.publish()
    again.reconcile()
    assert (again.serving_step(), again.ranking.best()) == (2, None)
    served = []
    for loss in (0.5, 0.8, 0.7):
        info = again.backlog.next()
        assert info is not None
        again.score(info, loss, dataset=changed)
        again.backlog.finished()
        again.reconcile()
        served.append(again.serving_step())
    assert served == [2, 1, 1]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"gate": ("test/loss better",)}, "say by how much"),
        ({"when_undecided": "serve"}, "there is no gate"),
        ({"gate": GATE, "when_undecided": "huge"}, r"there are \['test', 'big'\]"),
        (
            {"gate": ("big/loss <= 1 at 95%",), "when_undecided": "big"},
            r"there is no dataset 'big'; there are \['test'\]",
        ),
        ({"gate": GATE, "when_undecided": "big", "policy": "latest"}, "evaluation_policy is latest"),
        ({"gate": GATE, "datasets": ()}, "there is no dataset to score on"),
    ],
)
def test_a_gate_that_makes_no_sense_is_refused_at_the_start(
    make_harness: Make, settings: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        make_harness(**{"datasets": (DATASET, BIG), **settings})


@pytest.mark.parametrize(
    ("gate", "said"),
    [
        ("test/accuracy >= 1", r"there is no metric accuracy; there are \['loss'\]"),
        ("test/loss[label=3] <= 1", r"there is no slice 'label=3' in 'test'; there are \[\]"),
    ],
)
def test_what_is_not_computed_is_refused_with_what_there_is(make_harness: Make, gate: str, said: str) -> None:
    harness = make_harness(gate=(gate,))
    step(harness, 1, 0.5)

    (*_, decision) = harness.ledger.page()
    assert decision.outcome is REFUSED
    assert said.replace("\\", "") == decision.reason


def test_a_slice_that_does_not_exist_is_refused_with_some_that_do_or_why_there_are_none(make_harness: Make) -> None:
    harness = make_harness(gate=("test/loss[label=x] <= 1",))
    slices = tuple(SliceScore(name=f"label={label}", examples=1, metrics={"loss": 0.5}) for label in range(30))
    left_out = "slice 'label' is left out: there is no feature 'label'"

    def reason(number: int, **score: Any) -> str:
        harness.lifecycle.publish(number)
        harness.reconcile()
        info = harness.backlog.next()
        assert info is not None
        harness.score(info, 0.5, **score)
        harness.backlog.finished()
        harness.reconcile()
        return list(harness.ledger.page())[-1].reason

    assert reason(1, slices=slices).startswith(
        "there is no slice 'label=x' in 'test'; there are ['label=0', 'label=1',"
    )
    assert reason(2, slices=slices).endswith("] and 20 more")
    assert reason(3, notes=(left_out,)) == f"there is no slice 'label=x' in 'test'; {left_out}"


def test_what_is_held_back_is_known_with_the_reason_until_a_later_checkpoint_is_admitted(make_harness: Make) -> None:
    gate = ("test/loss <= 1", "big/loss <= 1")
    harness = make_harness(gate=gate, datasets=(DATASET, BIG))
    gatekeeper = harness.gatekeeper
    assert gatekeeper is not None
    assert gatekeeper.held_back() is None

    def scored(number: int, *losses: float) -> None:
        harness.lifecycle.publish(number)
        harness.reconcile()
        info = harness.backlog.next()
        assert info is not None
        for dataset, loss in zip((DATASET, BIG), losses, strict=False):
            harness.score(info, loss, dataset=dataset)
        if len(losses) == 1:
            harness.recorder.record_reason(*info.key, EvaluationOutcome.FAILED, "no column", dataset=BIG)
        harness.backlog.finished()
        harness.reconcile()

    def said() -> tuple[int | None, str] | None:
        held_back = gatekeeper.held_back()
        return None if held_back is None else (held_back.step, held_back.reason)

    scored(1, 0.5)
    failed = (1, "the gate cannot decide on step 1, as its evaluation on 'big' failed: no column")
    assert said() == failed
    scored(2, 0.5, 1.5)
    assert said() == (2, "the gate refused step 2: big/loss is 1.5; at most 1.0 is required")
    scored(3, 0.5, 0.5)
    assert said() is None
    assert harness.serving_step() == 3
