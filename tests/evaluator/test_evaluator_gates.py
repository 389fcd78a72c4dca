"""Gates at a confidence over real evaluations, and checkpoints that are scored again in another way."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from testkit.in_process import until
from testkit.real_run import FEATURES, WAIT_SECONDS, RealRun, outcomes, step_model, until_served, wait_for_records
from understudy.evaluator.datasets.dataset import ArrayDataset
from understudy.evaluator.evaluation.comparison import BootstrapOptions, DatasetBatches
from understudy.evaluator.evaluator_errors import ConfigurationError, NotReadyError
from understudy.evaluator.types import EvaluationOutcome

SCORED, ACCEPTED, REFUSED = EvaluationOutcome.SCORED, EvaluationOutcome.ACCEPTED, EvaluationOutcome.REFUSED
UNDECIDED = EvaluationOutcome.UNDECIDED

pytestmark = pytest.mark.usefixtures("logical_cpus")


def examples(name: str = "test", *, count: int = 60) -> ArrayDataset:
    """Return examples half of which step 3 is exact for, and a few more of which step 5 is exact for."""
    goals = np.where(np.arange(count) % 20 < 10, 3.0, np.where(np.arange(count) % 20 < 11, 4.0, 5.0))
    targets = np.repeat(goals[:, None], FEATURES, 1).astype(np.float32)
    return ArrayDataset(name, {"x": np.zeros((count, FEATURES), np.float32), "y": targets})


def test_a_gate_decides_by_the_paired_resamples_of_two_records_and_on_a_larger_dataset(tmp_path: Path) -> None:
    run = RealRun(tmp_path)
    gate = ("test/mae not worse by 0.25 at 95%", "test/mae <= 9 at 95%", "test/loss <= 100")
    datasets = [examples(), examples("big", count=6000)]
    run.publish(3)
    with run.running(datasets=datasets, gate=gate, when_undecided="big", resamples=200) as evaluator:
        run.publish(5)
        records = wait_for_records(evaluator, 7)
        until_served(evaluator, 5)
        pairs = [evaluator.ledger.resampled(record.sequence)["mae"] for record in (records[0], records[2])]

    found = outcomes(records)
    assert found[:4] == [(3, "test", SCORED), (3, "test", ACCEPTED), (5, "test", SCORED), (5, "test", UNDECIDED)]
    assert sorted(found[4:6]) == [(3, "big", SCORED), (5, "big", SCORED)]
    assert found[6:] == [(5, "big", ACCEPTED)]
    undecided, bound, point = records[3].conditions
    assert [each.outcome for each in (undecided, bound, point)] == [UNDECIDED, ACCEPTED, ACCEPTED]
    assert undecided.interval is not None
    low, high = np.quantile((pairs[1] - pairs[0]).astype(np.float64), [0.025, 0.975])  # the other one is decided
    assert (undecided.interval.low, undecided.interval.high) == pytest.approx((low, high), abs=1e-6)
    assert (undecided.baseline_step, undecided.baseline_value) == (3, records[0].metrics["mae"])
    assert (records[2].resamples, records[1].conditions[0].baseline_step) == (200, None)


def test_scored_again_with_resamples_an_undecided_checkpoint_is_decided(tmp_path: Path) -> None:
    run = RealRun(tmp_path)
    run.publish(3)
    with run.running(datasets=[examples()]) as evaluator:
        (before,) = wait_for_records(evaluator, 1)
        assert before.resamples == 0
    run.publish(4)
    with run.evaluator(datasets=[examples()], gate=("test/mae not worse by 5 at 95%",)) as evaluator:
        decisions = wait_for_records(evaluator, 4)
        assert outcomes(decisions[1:]) == [(3, "test", ACCEPTED), (4, "test", SCORED), (4, "test", UNDECIDED)]
        until_served(evaluator, 3)
        again = evaluator.score_dataset("test", version=3, rescore=True).result(WAIT_SECONDS)
        until_served(evaluator, 4)
        assert outcomes(wait_for_records(evaluator, 6)[4:]) == [(3, "test", SCORED), (4, "test", ACCEPTED)]
        assert (again.metrics, again.resamples) == (before.metrics, 1000)
        assert evaluator.score_dataset("test", version=3, rescore=True).result(WAIT_SECONDS) == again


def hitting_model(step: int, threshold: float) -> Any:
    """Return the model of a step with one more metric."""
    model = step_model(step)
    metrics = [
        keras.metrics.MeanAbsoluteError(name="mae"),
        keras.metrics.BinaryAccuracy(name="hit", threshold=threshold),
    ]
    model.compile(optimizer="sgd", loss="mse", metrics=metrics)
    return model


def test_only_metrics_of_one_configuration_are_compared_though_others_have_changed(tmp_path: Path) -> None:
    run = RealRun(tmp_path)
    for step, threshold in ((3, 0.5), (4, 0.5), (5, 4.5)):
        run.publish(step, model=hitting_model(step, threshold))
    gate = (
        "test/mae not worse by 5 than best at 95%",
        "test/hit not worse by 5 than best at 95%, more is better",
        "test/hit not worse by 5 than best, more is better",
    )
    with run.running(datasets=[examples()], gate=gate, version_policy="best", resamples=100) as evaluator:
        records = wait_for_records(evaluator, 6)
        comparison = evaluator.compare(
            [3, 4, 5], DatasetBatches(examples(), batch_size=16), bootstrap=BootstrapOptions(resamples=50)
        ).result(WAIT_SECONDS)
    scores = [record for record in records if record.outcome is SCORED]
    three, four, five = (each.metric_digests for each in sorted(scores, key=lambda record: record.step))
    assert three == four
    assert three.keys() == {"loss", "mae", "hit"}
    assert {name for name in three if three[name] != five[name]} == {"hit"}
    (decision,) = [record for record in records if record.step == 5 and record.outcome is not SCORED]
    of_mae, *of_hit = decision.conditions
    assert of_mae.baseline_value is not None
    assert [each.outcome for each in decision.conditions] == [ACCEPTED, UNDECIDED, ACCEPTED]
    assert all("hit has another configuration" in each.reason for each in of_hit)
    same, other = comparison.versions[1:]
    assert np.isfinite(same.differences["hit"])
    assert np.isnan(other.differences["hit"])
    assert np.isfinite(other.differences["mae"])
    assert same.metric_differences.keys() == {"loss", "mae", "hit"}
    assert other.metric_differences.keys() == {"loss", "mae"}
    (note,) = [note for note in comparison.notes if "configuration" in note]
    assert note.startswith("hit of step 5 has another configuration than that of step 3")


def test_a_comparison_says_which_metrics_only_one_version_has(tmp_path: Path) -> None:
    run = RealRun(tmp_path)
    run.publish(3)
    run.publish(5, model=hitting_model(5, 0.5))
    with run.running(datasets=[examples()]) as evaluator:
        wait_for_records(evaluator, 2)
        notes = [
            note
            for steps in ([3, 5], [5, 3])
            for note in evaluator.compare(steps, "test").result(WAIT_SECONDS).notes
            if "hit" in note
        ]
    said = "step 3 has no hit, which step 5 has, so they are not compared; name the metrics to compare with"
    assert notes == [said, said]


def test_a_dataset_that_changed_is_scored_anew_noted_and_never_mixed_with_the_old_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = RealRun(tmp_path)
    run.publish(3, 5)
    with run.running(datasets=[examples()], gate=("test/mae <= 9",), version_policy="best") as evaluator:
        before = wait_for_records(evaluator, 4)
        until_served(evaluator, 3)
    easy = ArrayDataset("test", {"x": np.zeros((4, FEATURES), np.float32), "y": np.full((4, FEATURES), 5, np.float32)})
    with run.running(datasets=[easy], gate=("test/mae <= 9",), version_policy="best") as evaluator:
        after = wait_for_records(evaluator, 6)[4:]
        until_served(evaluator, 5)
        assert evaluator.best_step == 5

    assert outcomes(after) == [(3, "test", SCORED), (5, "test", SCORED)]
    assert {record.dataset_digest for record in after} == {easy.digest} != {before[0].dataset_digest}
    newest = max(record.sequence for record in before if record.outcome is SCORED)
    assert f"entries up to {newest} were scored on other examples" in caplog.text
    assert [len(record.notes) for record in after] == [1, 0]


def why_not(ask: Callable[[], object]) -> str:
    """Return the text of the error that nothing is serving."""
    with pytest.raises(NotReadyError) as refused:
        ask()
    return str(refused.value)


def test_while_the_gate_refuses_all_checkpoints_errors_say_so_and_a_named_step_is_scored(tmp_path: Path) -> None:
    run = RealRun(tmp_path)
    with run.evaluator(datasets=[examples()], gate=("test/mae <= 0.1",)) as evaluator:
        assert why_not(evaluator.open_stream).endswith("wait for the first to be published and loaded")
        run.publish(3)
        until(lambda: "the gate refused step 3" in why_not(evaluator.open_stream))
        for ask in (evaluator.open_stream, evaluator.metadata, lambda: evaluator.score_dataset("test")):
            assert re.fullmatch(
                r"no checkpoint is serving yet; the gate refused step 3: test/mae is .*; at most 0.1 is required. Name "
                r"the step to use it all the same, 3, or have it served \(promote --pin 3\)",
                why_not(ask),
            )
        evaluator.open_stream(version=3).result(WAIT_SECONDS).close()
        run.publish(4)
        until(lambda: "the gate refused step 4" in why_not(evaluator.open_stream))


def regularized_model(step: int) -> Any:
    """Return a model whose loss is not 0 without weights, with a metric that they count for."""
    x = keras.Input((FEATURES,), name="x")
    y = keras.layers.Dense(FEATURES, name="y", kernel_initializer="ones", kernel_regularizer="l2")(x)
    model = keras.Model(x, y)
    model.get_layer("y").bias.assign(np.full(FEATURES, step, np.float32))
    weighted = [keras.metrics.MeanAbsoluteError(name="weighted_mae")]
    model.compile(loss="mse", metrics=[keras.metrics.MeanAbsoluteError(name="mae")], weighted_metrics=weighted)
    return model


def weighted(weights: list[float]) -> ArrayDataset:
    """Return examples of two kinds with these weights, repeated."""
    count, kinds = 40, np.array([b"a", b"b"] * 20, object)
    contents = {"x": np.zeros((count, FEATURES), "f4"), "y": np.full((count, FEATURES), 4, "f4"), "kind": kinds}
    return ArrayDataset("test", {**contents, "sample_weight": np.tile(weights, 20).astype("f4")}, features=["kind"])


@pytest.mark.parametrize(
    ("weights", "gate"),
    [
        (
            [0, 0],
            {
                "test/loss <= 100": "loss of 'test' is undefined: no example counts",
                "test/weighted_mae not worse by 1 at 95%": "weighted_mae of 'test' is undefined: the weights of",
                "test/mae <= 9": "",
            },
        ),
        (
            [1, 0],
            {
                "test/weighted_mae[kind=b] <= 9": "weighted_mae of slice 'kind=b' of 'test' is undefined: the wei",
                "test/loss[kind=b] <= 9": "loss of slice 'kind=b' of 'test' is undefined: no example counts",
                "test/weighted_mae[kind=a] <= 9": "",
            },
        ),
    ],
)
def test_a_gate_is_undecided_by_what_is_undefined_without_weights(
    tmp_path: Path, weights: list[float], gate: dict[str, str]
) -> None:
    run = RealRun(tmp_path)
    run.publish(3, model=regularized_model(3))
    with run.evaluator(datasets=[weighted(weights)], gate=tuple(gate), slice=("kind",), resamples=200) as evaluator:
        _, decision = wait_for_records(evaluator, 2)
    assert decision.outcome is UNDECIDED
    assert [each.outcome for each in decision.conditions] == [UNDECIDED, UNDECIDED, ACCEPTED]
    for condition, said in zip(decision.conditions, gate.values(), strict=True):
        assert condition.reason.startswith(said)


def test_a_gate_is_undecided_by_an_auc_of_labels_of_one_class_and_none_is_recorded_or_served(tmp_path: Path) -> None:
    run = RealRun(tmp_path)
    x = keras.Input((FEATURES,), name="x")
    model = keras.Model(x, keras.layers.Dense(1, "sigmoid", name="y")(x))
    model.compile(loss="binary_crossentropy", metrics=["accuracy", keras.metrics.AUC(name="auc")])
    kinds, labels = np.array([b"a", b"b"] * 20, object), np.tile([0, 1, 1, 1], 10).astype("f4")[:, None]
    contents = {"x": np.zeros((40, FEATURES), "f4"), "y": labels, "kind": kinds}
    examples_of_kinds = ArrayDataset("test", contents, features=["kind"])
    run.publish(3, model=model)
    settings: dict[str, Any] = {"datasets": [examples_of_kinds], "slice": ("kind",), "resamples": 200}
    with run.running(**settings) as evaluator:
        (scored,) = wait_for_records(evaluator, 1)
        until_served(evaluator, 3)
    reason = "no label that counts is negative"
    a, b = scored.slices
    assert (scored.undefined, a.undefined, b.undefined) == ({}, {}, {"auc": reason})
    assert "auc" not in b.metrics
    run.publish(4, model=model)
    gate = (
        "test/accuracy >= 0",
        "test/auc not worse by 0.1",
        "test/auc[kind=b] not worse by 0.02 at 95%",
        "test/auc[kind=b] >= 0",
    )
    with run.evaluator(gate=gate, **settings) as evaluator:
        *_, decision = wait_for_records(evaluator, 4)
        assert evaluator.serving_step is None
    assert [each.outcome for each in decision.conditions] == [ACCEPTED, ACCEPTED, UNDECIDED, UNDECIDED]
    assert {each.reason for each in decision.conditions[2:]} == {
        f"auc of slice 'kind=b' of 'test' is undefined: {reason}"
    }


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"gate": ("test/mae >= 1 at 99%",), "resamples": 100}, "resamples is 100; .* need at least 200"),
        ({"gate": ("test/mae[label=3] <= 1",)}, "no slices are configured; add --slice 'label'"),
        ({"gate": ("test/mae[label=3] <= 1",), "slice": ("predicted",)}, "there are slices by predicted"),
        ({"gate": ("test/mae <= 1",), "version_policy": 3}, "gate goes with version_policy latest or best"),
    ],
)
def test_gates_that_make_no_sense_stop_the_start(tmp_path: Path, settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        RealRun(tmp_path).evaluator(datasets=[examples()], **settings).start()
