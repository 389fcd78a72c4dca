from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from testkit import more_sample_models
from testkit.real_run import FEATURES, GOAL, WAIT_SECONDS, RealRun, step_model, wait_for_records
from understudy.checkpoints.keras_signature import signature_of
from understudy.evaluator.datasets.dataset import ArrayDataset, ExperimentDataset
from understudy.evaluator.evaluation.breakdown import BreakdownOptions
from understudy.evaluator.evaluation.comparison import BootstrapOptions
from understudy.evaluator.evaluation.slices import parse_slices
from understudy.evaluator.evaluator_errors import ConfigurationError, InvalidInputError
from understudy.evaluator.types import Batch, EvaluationOutcome, MetricSpec

pytestmark = pytest.mark.usefixtures("logical_cpus")

SETTINGS = ("country", "age:18,30", "age:q2", "town")
AGES = np.array([10.0, 20.0, 20.0, 40.0, 50.0] * 8)
COUNTRIES = np.array([b"FR", b"DE"] * 20, object)
GOALS = np.where(COUNTRIES == b"FR", GOAL, GOAL + 1)


def data(name: str = "test", **more: Any) -> ArrayDataset:
    inputs = {"x": np.zeros((40, FEATURES), np.float32), "y": np.repeat(GOALS[:, None], FEATURES, 1).astype("f4")}
    features = {"age": AGES, "country": COUNTRIES, **more}
    return ArrayDataset(name, {**inputs, **features}, features=list(features))


def test_slices_and_intervals_are_recorded_and_paired(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = RealRun(tmp_path)
    run.publish(3, 4)
    settings: dict[str, Any] = {"slice": SETTINGS, "resamples": 50, "slice_min_examples": 9, "evaluation_batch_size": 7}
    elsewhere = data("elsewhere", town=COUNTRIES)
    with run.running(datasets=[data(), elsewhere], **settings) as evaluator:
        third, _, fourth, _ = wait_for_records(evaluator, 4)
        slices = {part.name: part for part in third.slices}
        assert {name: part.examples for name, part in slices.items()} == {
            "country=DE": 20,
            "country=FR": 20,
            "age<18": 8,
            "age=[18,30)": 16,
            "age>=30": 16,
            "age<20": 8,
            "age>=20": 32,
        }
        assert slices["country=DE"].metrics == {"loss": 4.0, "mae": 2.0}
        assert slices["country=FR"].metrics == {"loss": 1.0, "mae": 1.0}
        assert slices["age<18"].metrics == {}
        assert slices["age<18"].notes == ("fewer than 9 examples",)
        assert third.metrics == {"loss": 2.5, "mae": 1.5}
        assert 1.0 < third.intervals["mae"].low < 1.5 < third.intervals["mae"].high < 2.0
        assert (third.resamples, third.confidence) == (50, 0.95)
        (note,) = third.notes
        assert "there is no feature 'town' to slice by; there are label, predicted, x, age, country" in note
        (warned,) = (record for record in caplog.records if getattr(record, "reason", "") == note)
        assert (warned.levelname, warned.dataset) == ("WARNING", "test")  # type: ignore[attr-defined]
        compared = evaluator.compare(
            [4, 3], "test", bootstrap=BootstrapOptions(resamples=50, slices=parse_slices(SETTINGS[:3]))
        ).result(WAIT_SECONDS)
    apart = compared.versions[1].metric_differences["mae"]
    resampled = compared.versions[1].score.resampled["mae"] - compared.versions[0].score.resampled["mae"]
    bounds = np.quantile(resampled, [0.025, 0.975])
    np.testing.assert_allclose([apart.value, apart.low, apart.high], [1.0, *bounds], atol=1e-6)
    by_name = {part.name: part.differences for part in compared.versions[1].slice_differences}
    assert by_name["country=FR"]["mae"].value == by_name["country=DE"]["mae"].value == 1.0
    assert fourth.slices[0].metrics == {"loss": 1.0, "mae": 1.0}


def test_a_stream_has_slices_and_intervals_by_options(tmp_path: Path) -> None:
    run = RealRun(tmp_path)
    run.publish(3)
    whole = next(iter(data().batches(signature_of(step_model(3)), 40)))
    with run.running() as evaluator:
        options = BreakdownOptions(slices=parse_slices(["country"]), resamples=10, confidence=0.5)
        with evaluator.open_stream(breakdown=options).result(WAIT_SECONDS) as stream:
            stream.add(whole).result(WAIT_SECONDS)
            result = stream.finish()
        assert [part.name for part in result.slices] == ["country=DE", "country=FR"]
        assert set(result.intervals) == {"loss", "mae"}
        options = BreakdownOptions(slices=parse_slices(["town"]))
        with evaluator.open_stream(breakdown=options).result(WAIT_SECONDS) as stream:
            adding = stream.add(whole)
            with pytest.raises(InvalidInputError, match="no feature 'town' to slice by; there are label, predicted, x"):
                adding.result(WAIT_SECONDS)
        with pytest.raises(InvalidInputError, match="a stream of batches has no quantiles; give edges"):
            evaluator.open_stream(breakdown=BreakdownOptions(slices=parse_slices(["age:q4"])))
        with evaluator.open_stream().result(WAIT_SECONDS) as stream:
            weights = np.where(np.arange(40) == 17, np.nan, 1.0)
            bad = Batch(inputs=whole.inputs, targets=whole.targets, sample_weights={"sample_weights": weights})
            with pytest.raises(InvalidInputError, match="sample weight 'sample_weights' is nan for example 17"):
                stream.add(bad)


def test_infinite_losses_of_examples_are_told_and_leave_the_slices_without_them_alone(tmp_path: Path) -> None:
    run = RealRun(tmp_path)
    run.publish(3)
    (whole,) = data().batches(signature_of(step_model(3)), 40)
    (targets,) = whole.targets.values()
    infinite = np.where(np.arange(40)[:, None] == 6, np.inf, targets).astype(np.float32)
    metrics = (MetricSpec(name="mse"), MetricSpec(name="R2Score"))
    options = BreakdownOptions(slices=parse_slices(["country"]), resamples=10)
    with run.running() as evaluator:
        with evaluator.open_stream(metrics=metrics, breakdown=options).result(WAIT_SECONDS) as stream:
            for goals in (targets, infinite):
                batch = dataclasses.replace(whole, targets={"targets": goals})
                stream.add(batch).result(WAIT_SECONDS)
            result = stream.finish()
        assert (result.metrics["loss"], result.metrics["mse"]) == (np.inf, np.inf)
        assert any("the loss of some examples is infinite" in note for note in result.notes)
        german, french = result.slices
        assert (french.metrics["loss"], german.name) == (np.inf, "country=DE")
        assert german.metrics["loss"] == german.metrics["mse"] <= german.intervals["mse"].high < np.inf


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"slice": ("age:30,18",)}, "the edges 30,18 do not ascend"),
        ({"slice": ("country*agee",)}, "no dataset has a feature 'agee'; there are label, predicted, age, country"),
        ({"resamples": -1}, "-1 resamples were requested; give 0 to 10000"),
        ({"confidence": 1.0}, "the confidence is 1.0"),
        ({"slice_min_examples": 0}, "slice_min_examples is 0; give at least 1"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_at_the_start(
    tmp_path: Path, settings: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigurationError, match=complaint), RealRun(tmp_path).running(datasets=[data()], **settings):
        pass


def test_outputs_within_a_list_in_a_dict_have_a_score_but_neither_slices_nor_intervals(tmp_path: Path) -> None:
    model = more_sample_models.nested()
    inputs, targets, _ = more_sample_models.nested_data(np.random.default_rng(0), 12)
    dataset = ExperimentDataset(
        "test", tf.data.Dataset.from_tensor_slices(keras.tree.lists_to_tuples((inputs, targets)))
    )
    run = RealRun(tmp_path)
    run.publish(3, model=model)
    refused = (
        r"no slices and no intervals, because the model's outputs \['deep/value', 'heads/0', 'heads/1'\] are nested"
    )
    with run.running(datasets=[dataset], slice=("label",), resamples=20) as evaluator:
        (record,) = wait_for_records(evaluator, 1)
        with pytest.raises(InvalidInputError, match=refused):
            evaluator.open_stream(breakdown=BreakdownOptions(resamples=10)).result(WAIT_SECONDS)
        with evaluator.open_stream().result(WAIT_SECONDS) as stream:
            stream.add(next(iter(dataset.batches(signature_of(model), 12)))).result(WAIT_SECONDS)
            plain = stream.finish()
    assert record.outcome is EvaluationOutcome.SCORED
    assert (record.slices, record.intervals, record.resamples) == ((), {}, 0)
    assert [note for note in record.notes if re.search(refused, note)]
    assert plain.metrics == pytest.approx(record.metrics, rel=1e-6)
    expected = model.evaluate(inputs, targets, verbose=0, return_dict=True)
    assert plain.metrics["loss"] == pytest.approx(expected["loss"], rel=1e-6)


def classifier() -> Any:
    x = keras.Input((FEATURES,), name="x")
    model = keras.Model(x, keras.layers.Dense(3, activation="softmax", name="y")(x))
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"], weighted_metrics=["accuracy"])
    return model


@pytest.mark.parametrize(
    ("label", "weight", "said"),
    [
        (3, 1.0, "target '(y|targets)' has 3 in example 5; a value from 0 to 2 was expected"),
        (2, np.nan, "sample weight 'sample_weights' is nan for example 5 of the batch; a finite number was expected"),
    ],
)
def test_labels_out_of_range_and_weights_that_are_no_numbers_are_refused_when_recorded_and_in_a_stream(
    tmp_path: Path, label: int, weight: float, said: str
) -> None:
    bad = np.arange(12) == 5
    arrays = {
        "x": np.zeros((12, FEATURES), np.float32),
        "y": np.where(bad, label, 1),
        "sample_weight": np.where(bad, weight, 1.0).astype(np.float32),
    }
    run = RealRun(tmp_path)
    run.publish(3, model=classifier())
    dataset = ArrayDataset("test", arrays)
    with run.running(datasets=[dataset], slice=("label",), resamples=20) as evaluator:
        (record,) = wait_for_records(evaluator, 1)
        options = BreakdownOptions(slices=parse_slices(["label"]), resamples=10)
        (batch,) = dataset.batches(signature_of(classifier()), 12)
        for breakdown in (None, options):
            with (
                evaluator.open_stream(breakdown=breakdown).result(WAIT_SECONDS) as stream,
                pytest.raises(InvalidInputError, match=said),
            ):
                stream.add(batch).result(WAIT_SECONDS)
    assert record.outcome is EvaluationOutcome.FAILED
    assert re.search(said, record.reason), record.reason
