from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.evaluator.evaluator_errors import ConfigurationError
from understudy.evaluator.serving.eligible_steps import choose_among
from understudy.evaluator.serving.ranking import Monitor, Ranking, parse_monitor
from understudy.evaluator.settings import MonitorMode, VersionPolicy
from understudy.evaluator.types import EvaluationOutcome, EvaluationRecord

LOSS = Monitor(dataset="test", metric="loss", mode="min")


def scored(
    step: int,
    value: float,
    *,
    dataset: str = "test",
    metric: str = "loss",
    configuration: str = "",
    own: str = "",
) -> EvaluationRecord:
    return EvaluationRecord(
        sequence=step,
        step=step,
        checkpoint_digest="d",
        dataset=dataset,
        outcome=EvaluationOutcome.SCORED,
        metrics={metric: value},
        metric_digest=configuration,
        metric_digests={metric: own} if own else {},
    )


def ranking(*records: EvaluationRecord, monitor: Monitor | None = LOSS) -> Ranking:
    ranking = Ranking(monitor)
    ranking.observe(records)
    return ranking


def test_nothing_is_best_before_the_first_result() -> None:
    assert ranking().best() is None
    assert ranking(scored(1, 0.5), monitor=None).best() is None


@pytest.mark.parametrize(("mode", "best"), [("min", 2), ("max", 3)])
def test_the_best_is_the_extreme_in_the_given_direction(mode: MonitorMode, best: int) -> None:
    monitor = Monitor(dataset="test", metric="loss", mode=mode)

    assert ranking(scored(1, 0.5), scored(2, 0.1), scored(3, 0.9), monitor=monitor).best() == best


def test_a_step_whose_value_is_undefined_is_not_the_best_and_no_metric_is_missing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    undefined = replace(scored(2, 0.1, metric="mae"), undefined={"loss": "no example counts"})

    assert ranking(undefined, scored(3, 0.5)).best() == 3
    assert "monitored metric missing" not in caplog.text
    assert ranking(scored(2, 0.1, metric="mae")).best() is None
    assert "monitored metric missing" in caplog.text


def test_of_equals_the_earliest_step_is_best() -> None:
    assert ranking(scored(3, 0.5), scored(1, 0.5), scored(2, 0.5)).best() == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_never_best(value: float) -> None:
    assert ranking(scored(1, value)).best() is None
    assert ranking(scored(1, value), scored(2, 7.0)).best() == 2


def test_other_datasets_and_metrics_do_not_count() -> None:
    assert ranking(scored(1, 0.1, dataset="other"), scored(2, 0.1, metric="mae"), scored(3, 9.0)).best() == 3


def test_a_score_without_the_monitored_metric_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    ranking(scored(1, 0.1, metric="mae"))

    assert "monitored metric missing" in caplog.text


def test_scores_of_differently_configured_metrics_are_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    before = [scored(1, 0.1, configuration="a"), scored(2, 0.2, configuration="a")]
    after = [scored(4, 0.9, configuration="b"), scored(3, 0.8, configuration="b")]
    assert ranking(*before).best() == 1
    assert not caplog.records
    changed = ranking(*before, *after)
    assert (changed.best(), changed.best_to_serve_among([1, 2]), changed.value(1)) == (3, None, 0.1)
    (warned,) = caplog.records
    assert "differently configured metrics are not ranked together" in warned.message
    assert ranking(*after, *before).best() == 3, "a step that is scored again does not decide what is compared"
    assert ranking(*before, *after, scored(5, 0.3)).best() == 5, "a score that does not say how counts with any"


def test_only_the_configuration_of_the_monitored_metric_decides_what_is_ranked_together() -> None:
    old = scored(1, 0.1, configuration="a")
    first = scored(2, 0.2, configuration="a", own="x")
    alike = scored(3, 0.3, configuration="b", own="x")
    other = scored(4, 0.4, configuration="c", own="y")
    assert ranking(first, alike).best() == 2, "another metric of theirs is configured otherwise"
    assert ranking(old, first, alike).best() == 2, "what an entry without digests of its metrics holds is not known"
    assert ranking(old, first).best() == 1, "all of its metrics are configured alike"
    assert ranking(first, alike, other).best() == 4
    assert ranking(other, first, alike).best_to_serve_among([2, 3]) is None


def test_the_best_is_sought_among_those_that_can_be_loaded() -> None:
    scores = ranking(scored(1, 0.1), scored(2, 0.5))
    loadable = scores.subset()
    for step in (2, 3):
        loadable.include(step, is_member=True)

    assert (scores.best_to_serve_among({2, 3}), loadable.best(), loadable.best_to_serve()) == (2, 2, 2)


def test_the_monitor_defaults_to_the_first_datasets_loss() -> None:
    assert parse_monitor(None, None, ["a", "b"]) == Monitor(dataset="a", metric="loss", mode="min")
    assert parse_monitor(None, None, []) is None


def test_a_monitor_names_a_dataset_and_a_metric() -> None:
    assert parse_monitor("b/top/5", "max", ["a", "b"]) == Monitor(dataset="b", metric="top/5", mode="max")


@pytest.mark.parametrize(("text", "said"), [("c/loss", "one of the datasets"), ("a", "DATASET/METRIC")])
def test_a_monitor_of_an_unknown_dataset_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        parse_monitor(text, "min", ["a", "b"])


def test_a_metric_that_is_no_loss_needs_its_direction() -> None:
    with pytest.raises(ConfigurationError, match="monitor_mode"):
        parse_monitor("a/accuracy", None, ["a"])


STEPS = range(6)
SCORES = st.tuples(
    st.sampled_from(STEPS),
    st.sampled_from([0.0, 1.0, 2.0, math.nan]),
    st.sampled_from(["present", "former", "oldest"]),
    st.sampled_from(["", "a", "b"]),
)
MEMBERSHIPS = st.tuples(st.sampled_from(STEPS), st.booleans())


@given(mode=st.sampled_from(["min", "max"]), changes=st.lists(SCORES | MEMBERSHIPS, max_size=40))
def test_the_best_of_a_subset_is_that_of_its_steps_whatever_changed_before(
    mode: MonitorMode, changes: list[tuple[int, float, str, str] | tuple[int, bool]]
) -> None:
    scores = Ranking(Monitor(dataset="test", metric="loss", mode=mode), "present")
    subset = scores.subset()
    members: set[int] = set()
    for change in changes:
        if len(change) == 2:
            subset.include(change[0], is_member=change[1])
            (members.add if change[1] else members.discard)(change[0])
        else:
            step, value, content, configuration = change
            scores.observe([replace(scored(step, value, configuration=configuration), dataset_digest=content)])

    assert subset.best_to_serve() == scores.best_to_serve_among(members)
    assert scores.best_to_serve() == scores.best_to_serve_among(STEPS)
    later = scores.subset()
    for step in STEPS:
        later.include(step, is_member=True)
    assert later.best() == scores.best()


@pytest.mark.parametrize(
    ("policy", "steps", "chosen"),
    [
        ("latest", {1, 2, 3}, 3),
        ("latest", {1, 2, 4}, 2),
        ("latest", set(), None),
        ("best", {1, 2, 3}, 2),
        ("best", {3}, None),
        (3, {1, 3}, 3),
        (7, {1, 3}, None),
    ],
)
def test_of_some_steps_the_policy_chooses_one_that_is_fit(
    policy: VersionPolicy | int, steps: set[int], chosen: int | None
) -> None:
    assert choose_among(policy, steps, ranking(scored(1, 0.5), scored(2, 0.1), scored(4, math.inf))) == chosen
