"""The scores over steps, from a real ledger, and the charts of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.evaluator.records.ledger import Ledger
from understudy.evaluator.types import EvaluationOutcome, EvaluationRecord, Interval
from understudy.service.page.chart import HEIGHT, WIDTH, draw
from understudy.service.page.history import MAX_POINTS, MAX_SERIES, History, Point, Series, serving_marks, thinned

SCORED, REFUSED, ACCEPTED = EvaluationOutcome.SCORED, EvaluationOutcome.REFUSED, EvaluationOutcome.ACCEPTED
FAILED, UNDECIDED = EvaluationOutcome.FAILED, EvaluationOutcome.UNDECIDED

finite = st.floats(-1e300, 1e300, allow_nan=False)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(tmp_path / "evaluations.sqlite")
    yield ledger
    ledger.close()


@pytest.fixture
def history(ledger: Ledger) -> History:
    return History(ledger)


def score(ledger: Ledger, step: int, content: str = "content", *, scoring_digest: str = "", **arguments: Any) -> None:
    ledger.append(
        EvaluationRecord(
            step=step,
            checkpoint_digest=f"digest {step}",
            dataset="test",
            dataset_digest=content,
            **{"outcome": SCORED, "metrics": {"loss": step / 10}, **arguments},
        ),
        scoring_digest=scoring_digest,
    )


def points(history: History) -> list[tuple[int, float]]:
    history.catch_up()
    return [(point.step, point.value) for one in history.series() for point in one.points]


def test_new_entries_are_added_to_those_that_were_read(ledger: Ledger, history: History) -> None:
    score(ledger, 20)
    assert points(history) == [(20, 2.0)]

    score(ledger, 10)
    score(ledger, 30)

    assert points(history) == [(10, 1.0), (20, 2.0), (30, 3.0)]


def test_entries_that_were_read_for_another_purpose_are_not_read_again(ledger: Ledger, history: History) -> None:
    score(ledger, 10)
    score(ledger, 20)
    for entry in ledger.page():
        history.add(entry)
    ledger._connection.execute("DELETE FROM evaluations WHERE step = 10")  # cannot be read any more
    score(ledger, 30)

    assert points(history) == [(10, 1.0), (20, 2.0), (30, 3.0)]


def test_the_newest_value_of_a_step_counts_and_its_interval_stays_with_it(ledger: Ledger, history: History) -> None:
    score(ledger, 10)
    score(ledger, 10, scoring_digest="other", metrics={"loss": 5.0}, intervals={"loss": Interval(low=4.0, high=6.0)})

    assert points(history) == [(10, 5.0)]
    assert history.series()[0].points[0].interval == Interval(low=4.0, high=6.0)
    assert history.series()[0].values == 1


def test_values_of_a_metric_in_another_configuration_are_not_drawn_with_those_of_the_newest_step(
    ledger: Ledger, history: History
) -> None:
    for step, digest in ((10, "top 3"), (20, "top 3"), (30, "top 5"), (40, "top 5")):
        score(ledger, step, metric_digests={"loss": digest}, metric_digest=f"whole {step}")
    assert points(history) == [(30, 3.0), (40, 4.0)]
    score(ledger, 20, metric_digests={"loss": "top 3"}, scoring_digest="again")
    assert points(history) == [(30, 3.0), (40, 4.0)], "an earlier step that is scored again"


def test_values_on_other_content_of_a_dataset_are_not_drawn_with_those_on_the_present_one(
    ledger: Ledger, history: History
) -> None:
    score(ledger, 10)
    score(ledger, 20, content="new content")

    assert points(history) == [(20, 2.0)]


def test_numbers_that_are_not_finite_are_counted_and_not_drawn(ledger: Ledger, history: History) -> None:
    score(ledger, 10, metrics={"loss": math.nan})
    score(ledger, 20, metrics={"loss": math.inf})

    assert points(history) == []
    assert history.series()[0].not_finite == 2


def test_a_thousand_metrics_are_bounded_and_the_rest_is_counted(ledger: Ledger, history: History) -> None:
    score(ledger, 10, metrics={f"metric {number}": 1.0 for number in range(1000)})

    assert len(points(history)) == MAX_SERIES
    assert history.left_out == MAX_SERIES


def test_a_thousand_metrics_do_not_displace_the_monitored_one(ledger: Ledger) -> None:
    history = History(ledger, ("test", "loss"))
    score(ledger, 10, metrics={f"metric {number}": 1.0 for number in range(1000)})
    score(ledger, 20)

    assert (20, 2.0) in points(history)
    assert [one.metric for one in history.series()][-1] == "loss"


def test_what_the_gate_and_failures_hold_back_is_marked_until_it_is_accepted_or_scored(
    ledger: Ledger, history: History
) -> None:
    score(ledger, 10, outcome=REFUSED)
    score(ledger, 20, outcome=UNDECIDED)
    score(ledger, 30, outcome=FAILED)
    history.catch_up()
    marked = [(mark.step, mark.kind) for mark in history.marks()]
    score(ledger, 20, outcome=ACCEPTED)
    score(ledger, 30)
    history.catch_up()

    assert marked == [(10, "refused"), (20, "undecided"), (30, "failed")]
    assert [mark.step for mark in history.marks()] == [10]


def test_a_step_whose_rollout_went_back_is_marked_until_it_is_rolled_out(ledger: Ledger, history: History) -> None:
    score(ledger, 10, outcome=ACCEPTED)
    score(ledger, 10, outcome=EvaluationOutcome.ROLLOUT_ROLLED_BACK, metrics={})
    score(ledger, 10)
    history.catch_up()
    marked = [(mark.step, mark.kind) for mark in history.marks()]
    score(ledger, 10, outcome=EvaluationOutcome.ROLLOUT_PROMOTED, metrics={})
    history.catch_up()

    assert marked == [(10, "rolled back")]
    assert history.marks() == []


@pytest.mark.parametrize(
    ("served", "kinds"),
    [
        ([], {}),
        ([10, 20, 20, 30], {10: "served", 20: "served", 30: "served"}),
        ([10, 20, 30, 10], {10: "served", 20: "served", 30: "rolled back"}),
        ([10, 30, 10, 30], {10: "served", 30: "served"}),
    ],
)
def test_a_step_that_an_older_one_followed_was_rolled_back_unless_it_served_again(
    served: list[int], kinds: dict[int, str]
) -> None:
    assert {mark.step: mark.kind for mark in serving_marks(served)} == kinds


@given(
    st.lists(st.tuples(st.integers(0, 10**9), finite), unique_by=lambda one: one[0], max_size=60), st.integers(4, 20)
)
def test_thinning_keeps_the_ends_and_the_extremes_and_their_order(values: list[tuple[int, float]], most: int) -> None:
    before = [Point(step, value, None) for step, value in sorted(values)]

    after = thinned(before, most)

    assert len(after) <= most
    assert set(after) <= set(before)
    assert [point.step for point in after] == sorted(point.step for point in after)
    assert after[:1] + after[-1:] == before[:1] + before[-1:]
    assert (
        {min(after, key=lambda one: one.value).value, max(after, key=lambda one: one.value).value}
        == {
            min(before, key=lambda one: one.value).value,
            max(before, key=lambda one: one.value).value,
        }
        if before
        else not after
    )


def test_a_long_history_is_held_in_few_points_with_its_single_spike(ledger: Ledger, history: History) -> None:
    for step in range(2500):
        with_spike = {"metrics": {"loss": 99.0}} if step == 700 else {}
        ledger._connection.execute(  # a commit for each would take long
            "INSERT INTO evaluations (step, checkpoint_digest, dataset, dataset_digest, outcome, reason, metrics, "
            "examples, duration_seconds, recorded_at, notes) VALUES "
            "(?, '', 'test', '', 'scored', '', ?, 1, 1, 1, '[]')",
            (step, '{"loss": "99.0"}' if with_spike else '{"loss": "1.0"}'),
        )
    ledger._last_sequence = 2500

    found = points(history)

    assert len(found) <= MAX_POINTS
    assert (700, 99.0) in found
    assert history.series()[0].values == 2500


@given(
    st.lists(
        st.tuples(st.integers(0, 2**63 - 1), finite, st.none() | st.tuples(finite, finite)),
        unique_by=lambda one: one[0],
        min_size=1,
        max_size=30,
    )
)
def test_a_chart_lies_within_its_picture_whatever_the_numbers(
    values: list[tuple[int, float, tuple[float, float] | None]],
) -> None:
    drawn = draw(
        Series(
            dataset="test",
            metric="loss",
            points=[
                Point(step, value, None if ends is None else Interval(low=min(ends), high=max(ends)))
                for step, value, ends in sorted(values)
            ],
            values=len(values),
            not_finite=0,
        ),
        [],
        values[0][0],
    )

    for text in (drawn.line, *drawn.bands):
        for place in text.split():
            x, y = map(float, place.split(","))
            assert 0 <= x <= WIDTH
            assert 0 <= y <= HEIGHT
    assert all(0 <= tick.place <= WIDTH for tick in (*drawn.x_ticks, *drawn.y_ticks))
    assert len(drawn.x_ticks) <= 8
    assert len(drawn.y_ticks) <= 8
    assert drawn.serving_x is not None
