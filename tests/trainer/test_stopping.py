from __future__ import annotations

import math
from dataclasses import replace

import pytest

from understudy.checkpoints.evaluation_results import MetricConfiguration, StepResult
from understudy.trainer.stopping import StopMode, StopRule, parse_stop_rule

LOSS = StopRule(dataset="test", metric="loss", evaluations=2, mode="min")


def results(*values: float | None, metric: str = "loss") -> list[StepResult]:
    """Return one result per value, of steps 10, 20, ...; None for one that failed."""
    return [
        StepResult(
            step=10 * place,
            settled=True,
            datasets=frozenset({"test"}),
            scores={} if value is None else {"test": {metric: value}},
            digests=frozenset(),
        )
        for place, value in enumerate(values, start=1)
    ]


@pytest.mark.parametrize(
    ("values", "stops"),
    [
        ((), False),
        ((1.0,), False),
        ((1.0, 2.0), False),
        ((1.0, 2.0, 3.0), True),
        ((1.0, 2.0, 0.5), False),
        ((1.0, 1.0, 1.0), True),
        ((1.0, 2.0, None, 0.5, 0.6), False),
        ((1.0, math.nan, math.inf), True),
        ((math.nan, math.nan), True),
        ((1.0, -math.inf, 2.0), True),
    ],
)
def test_it_stops_after_so_many_evaluations_without_an_improvement(
    *, values: tuple[float | None, ...], stops: bool
) -> None:
    assert (LOSS.reason_to_stop(results(*values), up_to_step=1000) is not None) is stops


def test_more_may_be_better() -> None:
    rule = StopRule(dataset="test", metric="accuracy", evaluations=2, mode="max")
    assert rule.reason_to_stop(results(0.1, 0.2, 0.3, metric="accuracy"), up_to_step=30) is None
    reason = rule.reason_to_stop(results(0.1, 0.5, 0.3, 0.4, metric="accuracy"), up_to_step=40)
    assert reason == "test/accuracy has not improved in 2 evaluations; the best is 0.5 at step 20"


def test_scores_on_other_examples_than_the_newest_do_not_count() -> None:
    old, *new = results(0.1, 3.0, 2.0, 2.5, 2.6)
    changed = [replace(result, contents={"test": "b"}) for result in new]

    assert LOSS.reason_to_stop([replace(old, contents={"test": "a"}), *changed[:3]], up_to_step=1000) is None
    reason = LOSS.reason_to_stop([replace(old, contents={"test": "a"}), *changed], up_to_step=1000)
    assert reason == "test/loss has not improved in 2 evaluations; the best is 2 at step 30"


def test_values_of_a_metric_that_is_configured_otherwise_than_in_the_newest_score_do_not_count() -> None:
    def configured(result: StepResult, own: str) -> StepResult:
        return replace(result, configurations={"test": {"loss": MetricConfiguration(own, f"all at {result.step}")}})

    old, *new = results(0.1, 3.0, 2.0, 2.5, 2.6)
    changed = [configured(result, "b") for result in new]

    assert LOSS.reason_to_stop([configured(old, "a"), *changed[:3]], up_to_step=1000) is None
    reason = LOSS.reason_to_stop([configured(old, "a"), *changed], up_to_step=1000)
    assert reason == "test/loss has not improved in 2 evaluations; the best is 2 at step 30"
    reason = LOSS.reason_to_stop([old, *changed], up_to_step=1000)
    assert reason == "test/loss has not improved in 4 evaluations; the best is 0.1 at step 10", "it does not say how"


def test_an_evaluation_in_which_the_metric_is_undefined_does_not_count() -> None:
    first, lacking, *rest = results(1.0, None, 2.0, 3.0)
    undefined = replace(lacking, scores={"test": {"auc": 0.5}}, undefined={"test": frozenset({"loss"})})

    assert LOSS.reason_to_stop([first, undefined, rest[0]], up_to_step=1000) is None
    reason = LOSS.reason_to_stop([first, undefined, *rest], up_to_step=1000)
    assert reason == "test/loss has not improved in 2 evaluations; the best is 1 at step 10"


def test_results_of_later_steps_do_not_count() -> None:
    assert LOSS.reason_to_stop(results(1.0, 2.0, 3.0), up_to_step=20) is None


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("tset/loss:1", "no dataset is called 'tset'; there are test"),
        ("test/lass:1", "'test' has no metric 'lass'; it has loss"),
    ],
)
def test_a_rule_that_can_never_apply_is_an_error(rule: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_stop_rule(rule, "min").reason_to_stop(results(1.0), up_to_step=10)


@pytest.mark.parametrize(
    ("text", "mode", "rule"),
    [
        ("test/loss:5", None, StopRule(dataset="test", metric="loss", evaluations=5, mode="min")),
        ("a/b/c:d:1", "max", StopRule(dataset="a", metric="b/c:d", evaluations=1, mode="max")),
    ],
)
def test_a_rule_is_read(text: str, mode: StopMode | None, rule: StopRule) -> None:
    assert parse_stop_rule(text, mode) == rule


@pytest.mark.parametrize("text", ["", "loss:5", "test/loss", "test/loss:0", "test/loss:x", "/loss:1", "test/:1"])
def test_a_rule_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="give DATASET/METRIC:N"):
        parse_stop_rule(text)


def test_a_metric_that_is_no_loss_needs_its_direction() -> None:
    with pytest.raises(ValueError, match="say with stop_mode"):
        parse_stop_rule("test/accuracy:3")
