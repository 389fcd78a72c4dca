"""The language of gates, and their three outcomes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.evaluator.evaluation.bootstrap import draw
from understudy.evaluator.evaluator_errors import ConfigurationError
from understudy.evaluator.serving.gate_trial import Measured, judge, outcome_of
from understudy.evaluator.serving.gates import (
    ACCEPTED,
    REFUSED,
    UNDECIDED,
    Condition,
    known_direction,
    least_resamples,
    parse_gate,
)
from understudy.evaluator.types import Array, EvaluationOutcome

RANK = {REFUSED: 0, UNDECIDED: 1, ACCEPTED: 2}


def parsed(text: str) -> Condition:
    slices = [("label",), ("age",), ("country", "label"), ("a=b",)]
    return parse_gate(text, datasets=["test", "big"], modes={"test/lift": "max"}, slices=slices)


def outcome(text: str, on: Measured) -> EvaluationOutcome:
    return judge([(parsed(text), on)])[0].outcome


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("test/accuracy >= 0.9", ("accuracy", None, "at least", 0.9, None, "max", None)),
        ("test/loss<=.3 at 99%", ("loss", None, "at most", 0.3, None, "min", 0.99)),
        ("test/top/5>=1e-3", ("top/5", None, "at least", 1e-3, None, "max", None)),
        ("test/loss not worse", ("loss", None, "not worse", 0.0, "serving", "min", None)),
        (
            "test/accuracy[label=3] not worse by 0.02 at 95%",
            ("accuracy", "label=3", "not worse", 0.02, "serving", "max", 0.95),
        ),
        ("test/auc better than best by 0.01", ("auc", None, "better", 0.01, "best", "max", None)),
        (
            "test/loss[age=[18,30)] not  worse at 99.5 % by 1",
            ("loss", "age=[18,30)", "not worse", 1.0, "serving", "min", 0.995),
        ),
        ("test/loss[age>=65] <= 2", ("loss", "age>=65", "at most", 2.0, None, "min", None)),
        (
            "test/loss[country=New Zealand,label=3] <= 1",
            ("loss", "country=New Zealand,label=3", "at most", 1.0, None, "min", None),
        ),
        (
            "test/loss[country=a,b=c,label=3] <= 1",
            ("loss", "country=a,b=c,label=3", "at most", 1.0, None, "min", None),
        ),
        ("test/loss[a=b=3] <= 1", ("loss", "a=b=3", "at most", 1.0, None, "min", None)),
        ("test/AUC (PR), best of 2 >= 0.9", ("AUC (PR), best of 2", None, "at least", 0.9, None, "max", None)),
        ("test/top 1[age>=3] not worse, more is better", ("top 1", "age>=3", "not worse", 0.0, "serving", "max", None)),
        ("test/lift not worse", ("lift", None, "not worse", 0.0, "serving", "max", None)),
        ("big/lift not worse, less is better", ("lift", None, "not worse", 0.0, "serving", "min", None)),
    ],
)
def test_a_condition_is_read_in_every_form(text: str, expected: tuple[object, ...]) -> None:
    found = parsed(text)

    values = (found.metric, found.slice_name, found.rule, found.number, found.baseline, found.mode, found.confidence)
    assert values == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("accuracy >= 0.9", "a value and a rule are expected"),
        ("test/accuracy is good", "a value and a rule are expected"),
        ("train/accuracy >= 0.9", r"there is no dataset 'train'; there are \['big', 'test'\]"),
        ("test/accuracy >= high", "a number is expected"),
        ("test/accuracy >= 0.9 than best", "'than best' is not understood there"),
        ("test/accuracy >= 0.9x", "a number is expected"),
        ("test/accuracy better", "say by how much"),
        ("test/accuracy not worse by -1", "the margin is -1.0"),
        ("test/accuracy not worse by 1 by 2", "'by 2' is not understood there"),
        ("test/accuracy not worse at 95", "'at 95' is not understood there"),
        ("test/accuracy not worse at 100%", "the confidence is 100%; give a number between 0 and 100"),
        ("test/accuracy not worse at nan%", "the confidence is nan%"),
        ("test/accuracy not worse at much%", "the confidence is much%"),
        (
            "big/lift not worse",
            "does not tell whether more or less of 'lift' is better; end it with ', more is better'",
        ),
        ("test/accuracy[color=red] >= 1", r"no slices by 'color'; there are slices by a=b, age, country\*label, label"),
        (
            "test/accuracy[label=3,country=FR] >= 1",
            r"no slices by 'label\*country'; there are slices by .*, country\*label, .*; add --slice 'label\*country'",
        ),
        ("test/accuracy[label=3,age=4] >= 1", r"no slices by 'label\*age'"),
        ("test/accuracy[3] >= 1", "no slices by '3'"),
    ],
)
def test_a_condition_that_cannot_be_read_is_refused_with_what_there_is(text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        parsed(text)


@pytest.mark.parametrize(
    ("metric", "mode"),
    [
        *(("loss", "min"), ("digits_loss", "min"), ("mean_absolute_error", "min"), ("binary_crossentropy", "min")),
        *(("accuracy", "max"), ("sparse_categorical_accuracy", "max"), ("auc_1", "max"), ("mean_io_u", "max")),
        *(("top_k_categorical_accuracy", "max"), ("precision_at_recall", "max"), ("f1_score", "max")),
        *(("lift", None), ("trauc", None), ("lossless", None)),
    ],
)
def test_the_direction_follows_from_the_names_of_keras(metric: str, mode: str | None) -> None:
    assert known_direction(metric) == mode


@settings(max_examples=40)
@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_without_a_confidence_a_bound_is_exact_to_the_precision_of_the_values(value: float, bound: float) -> None:
    close = math.isclose(np.float32(value), np.float32(bound), rel_tol=2.0**-22)
    least = outcome(f"test/accuracy >= {bound!r}", Measured(value=value))
    most = outcome(f"test/accuracy <= {bound!r}", Measured(value=value))

    assert least is (ACCEPTED if value >= bound else REFUSED) or close
    assert most is (ACCEPTED if value <= bound else REFUSED) or close


def test_a_float32_on_the_bound_is_accepted() -> None:
    nine_of_ten = float(np.float32(0.9))

    assert nine_of_ten < 0.9
    assert outcome("test/accuracy >= 0.9", Measured(value=nine_of_ten)) is ACCEPTED
    worse = Measured(value=nine_of_ten, baseline_step=1, baseline_value=float(np.float32(0.91)))
    assert outcome("test/accuracy not worse by 0.01", worse) is ACCEPTED
    assert outcome("test/accuracy not worse by 0.0099", worse) is REFUSED


RESAMPLES = st.lists(st.floats(-1.0, 1.0), min_size=40, max_size=60).map(np.asarray)


def difference(resampled: Array, shift: float = 0.0) -> Measured:
    return Measured(value=0.5 + shift, baseline_step=1, baseline_value=0.5, resampled=resampled + shift)


@settings(max_examples=40)
@given(RESAMPLES, st.floats(0.0, 0.5))
def test_the_outcome_is_where_the_interval_lies(resampled: Array, margin: float) -> None:
    low, high = np.quantile(resampled, [0.025, 0.975])
    expected = ACCEPTED if low >= -margin else REFUSED if high < -margin else UNDECIDED
    (result,) = judge([(parsed(f"test/accuracy not worse by {margin!r} at 95%"), difference(resampled))])

    assert result.interval is not None
    assert (result.interval.low, result.interval.high) == pytest.approx((low, high), abs=1e-12)
    assert result.outcome is expected or min(abs(low + margin), abs(high + margin)) < 1e-6


@settings(max_examples=40)
@given(RESAMPLES, st.floats(0.0, 0.5), st.floats(0.0, 0.5), st.floats(0.0, 0.5))
def test_a_better_checkpoint_and_a_wider_margin_never_have_a_worse_outcome(
    resampled: Array, margin: float, shift: float, wider: float
) -> None:
    before = RANK[outcome(f"test/accuracy not worse by {margin!r} at 95%", difference(resampled))]

    assert RANK[outcome(f"test/accuracy not worse by {margin!r} at 95%", difference(resampled, shift))] >= before
    assert RANK[outcome(f"test/accuracy not worse by {margin + wider!r} at 95%", difference(resampled))] >= before


@settings(max_examples=40)
@given(RESAMPLES, st.floats(0.0, 0.5))
def test_less_is_better_is_more_is_better_of_the_opposite(resampled: Array, margin: float) -> None:
    more = outcome(f"big/x not worse by {margin!r} at 95%, more is better", difference(resampled))
    less = outcome(f"big/x not worse by {margin!r} at 95%, less is better", difference(-resampled))

    assert more is less


@settings(max_examples=40)
@given(st.lists(st.tuples(RESAMPLES, st.floats(0.0, 0.5)), min_size=1, max_size=4))
def test_holms_correction_only_moves_decisions_to_undecided(parts: list[tuple[Array, float]]) -> None:
    measured = [(parsed(f"test/accuracy not worse by {m!r} at 80%"), difference(values)) for values, m in parts]
    together = [result.outcome for result in judge(measured)]
    alone = [judge([each])[0].outcome for each in measured]

    assert all(both in (single, UNDECIDED) for both, single in zip(together, alone, strict=True))
    assert list(reversed(judge(list(reversed(measured))))) == judge(measured)


def test_holms_correction_stops_counting_conditions_that_are_decided() -> None:
    rising = np.linspace(-1.0, 1.0, 101)
    borderline = difference(rising + 0.93)  # its interval excludes a loss of 0.035 at 95%, and not at 97.5%
    clear = difference(rising + 5.0)
    condition = parsed("test/accuracy not worse by 0.03 at 95%")

    assert judge([(condition, borderline)])[0].outcome is ACCEPTED
    both = judge([(condition, borderline), (condition, clear)])
    assert [result.outcome for result in both] == [ACCEPTED, ACCEPTED]
    assert "corrected for 2" in both[1].reason
    twice = judge([(condition, borderline), (condition, borderline)])
    assert [result.outcome for result in twice] == [UNDECIDED, UNDECIDED]


def test_a_gate_is_refused_by_one_condition_and_undecided_by_one() -> None:
    rising = np.linspace(-1.0, 1.0, 101)
    good, bad = Measured(value=0.95), Measured(value=0.5)
    point, interval = parsed("test/accuracy >= 0.9"), parsed("test/accuracy not worse at 95%")

    assert outcome_of(judge([(point, good)])) is ACCEPTED
    assert outcome_of(judge([(point, good), (interval, difference(rising))])) is UNDECIDED
    assert outcome_of(judge([(point, bad), (interval, difference(rising))])) is REFUSED


def test_without_a_baseline_a_comparison_is_accepted_and_without_resamples_undecided() -> None:
    text = "test/accuracy not worse by 0.01 at 95%"

    assert outcome(text, Measured(value=0.9)) is ACCEPTED
    unpaired = Measured(value=0.9, baseline_step=1, baseline_value=0.9, lacks="step 1 has no resamples")
    (result,) = judge([(parsed(text), unpaired)])
    assert (result.outcome, result.interval) == (UNDECIDED, None)
    assert result.reason.endswith("step 1 has no resamples")
    assert outcome(text, Measured(value=math.nan, lacks="it is not finite")) is REFUSED


@pytest.mark.parametrize(
    "text", ["test/auc >= 0", "test/auc <= 1 at 95%", "test/auc not worse by 1", "test/auc better by 1 at 95%"]
)
def test_every_condition_is_undecided_by_a_value_or_baseline_that_is_undefined(text: str) -> None:
    own = Measured(value=math.nan, undefined="auc is undefined: one class")
    (result,) = judge([(parsed(text), own)])
    assert (result.outcome, result.reason) == (UNDECIDED, "auc is undefined: one class")
    other = Measured(value=0.9, baseline_step=1, undefined="of step 1, auc is undefined: one class")
    assert outcome(text, other) is UNDECIDED


@pytest.mark.parametrize("text", ["test/auc not worse by 0.1 at 95%", "test/auc better by 1 at 95%"])
@pytest.mark.parametrize("missing", [math.nan, math.inf])
def test_more_resamples_without_a_value_than_may_lie_beyond_a_bound_leave_it_undecided(
    text: str, missing: float
) -> None:
    values = np.linspace(-0.01, 0.01, 1000)
    values[:30] = missing
    (result,) = judge([(parsed(text), difference(values))])

    assert (result.outcome, result.interval) == (UNDECIDED, None)
    assert "has no value in 30 of 1000 resamples" in result.reason
    assert outcome(text, difference(np.full(50, missing))) is UNDECIDED


def test_a_few_resamples_without_a_value_count_as_beyond_both_bounds() -> None:
    values = np.linspace(-0.01, 0.01, 1000)
    values[500:510] = math.nan
    (result,) = judge([(parsed("test/auc not worse by 0.1 at 95%"), difference(values))])

    assert result.outcome is ACCEPTED
    assert result.interval is not None
    low, high = (
        np.quantile(np.where(np.isnan(values), fill, values), share) for fill, share in ((-1, 0.025), (1, 0.975))
    )
    assert (result.interval.low, result.interval.high) == pytest.approx((low, high), abs=1e-12)
    both = judge([(parsed(f"test/auc not worse by {margin} at 99%"), difference(values)) for margin in (0.1, 0.2)])
    assert [each.outcome for each in both] == [UNDECIDED, UNDECIDED]


def test_a_metric_that_one_class_leaves_undefined_decides_as_often_as_the_confidence_says() -> None:
    random, condition = np.random.default_rng(0), parsed("test/recall >= 0.5 at 90%")
    draws, found = draw(0, 400, 0, 200).astype(np.float64), []
    for _ in range(300):
        positive = random.random(200) < 0.015  # 1 to 8 are
        right = positive & (random.random(200) < 0.5)
        if not positive.any():
            continue
        with np.errstate(invalid="ignore", divide="ignore"):
            resampled = (draws @ right) / (draws @ positive)
        found.append(
            outcome_of(judge([(condition, Measured(value=right.sum() / positive.sum(), resampled=resampled))]))
        )

    assert found.count(ACCEPTED) / len(found) < 0.1
    assert found.count(REFUSED) / len(found) < 0.1


def test_the_fewest_resamples_leave_one_beyond_each_bound() -> None:
    assert least_resamples([parsed("test/accuracy >= 0.9")]) == 0
    assert least_resamples([parsed("test/accuracy >= 0.9 at 95%")]) == 40
    assert least_resamples([parsed("test/accuracy >= 0.9 at 95%"), parsed("test/loss <= 1 at 99%")]) == 400


def test_what_is_worse_by_the_margin_is_accepted_and_refused_as_rarely_as_the_confidence_says() -> None:
    examples, trials, random = 500, 1000, np.random.default_rng(0)
    draws = draw(0, 400, 0, examples).astype(np.float64)
    before = random.random((examples, trials)) < 0.9
    change = random.random((examples, trials))
    after = np.where(before, change < 0.95, change < 0.25)  # right in 0.9 * 0.95 + 0.1 * 0.25 = 0.88 of the cases
    values = (draws @ after - draws @ before) / draws.sum(axis=1, keepdims=True)
    condition = parsed("test/accuracy not worse by 0.02 at 95%")

    found = [
        judge([(condition, Measured(value=new, baseline_step=1, baseline_value=old, resampled=resampled))])[0].outcome
        for new, old, resampled in zip(after.mean(axis=0), before.mean(axis=0), values.T, strict=True)
    ]
    assert 0.01 < found.count(ACCEPTED) / trials < 0.04
    assert 0.01 < found.count(REFUSED) / trials < 0.04
