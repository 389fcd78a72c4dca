"""What a caller may make of the metrics, and that Keras agrees with the catalog."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras.src.metrics import ALL_OBJECTS_DICT

from testkit import sample_models
from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.evaluator.model.compilation import check_metrics
from understudy.evaluator.model.metric_catalog import CATALOG, MAX_METRICS, class_named
from understudy.evaluator.model.slot import Slot
from understudy.evaluator.types import Batch, MetricSpec

NOT_FOR_CALLERS = {"Mean", "MeanMetricWrapper", "Metric", "Sum"}

CALLS_A_FUNCTION = {
    "fn": {
        "module": "builtins",
        "class_name": "function",
        "config": "set_epsilon",
        "registered_name": "function",
    }
}


def check(metric: str, /, **config: Any) -> None:
    check_metrics([MetricSpec(name=metric, config=config)], ["y"])


def test_every_name_that_keras_knows_stands_for_its_class_or_for_nothing() -> None:
    for name, kind in ALL_OBJECTS_DICT.items():
        if isinstance(kind, type):
            assert class_named(name) == (None if kind.__name__ in NOT_FOR_CALLERS else kind.__name__), name


def test_every_argument_of_the_catalog_is_one_of_the_class() -> None:
    for name, parameters in CATALOG.items():
        arguments = inspect.signature(getattr(keras.metrics, name)).parameters
        assert parameters.keys() <= arguments.keys(), name


@pytest.mark.parametrize(
    "name",
    [
        "function",
        "5",
        "0",
        "MeanMetricWrapper",
        "mean_metric_wrapper",
        "Functional",
        "Lambda",
        "keras>Dense",
        "x" * 3000,
    ],
)
def test_a_metric_that_is_not_in_the_catalog_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidInputError, match=name[:60]):
        check(name)
    with pytest.raises(InvalidInputError, match=name[:60]):
        check(name, fn="mse")


def test_a_registered_object_that_is_no_metric_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="AddsLoss"):
        check(f"{sample_models.PACKAGE}>AddsLoss")


def test_a_configuration_never_reaches_a_keras_deserializer(monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(*_: Any, **__: Any) -> None:
        raise AssertionError("a caller's configuration reached Keras")

    for place in ("keras.saving.deserialize_keras_object", "keras.src.metrics.deserialize", "keras.metrics.get"):
        monkeypatch.setattr(place, reached)
    check("AUC", curve="PR", name="pr", dtype="float32")
    with pytest.raises(InvalidInputError, match="MeanMetricWrapper"):
        check("MeanMetricWrapper", **CALLS_A_FUNCTION)


def test_a_function_in_a_configuration_is_not_called(tmp_path: Path) -> None:
    epsilon = keras.config.epsilon()
    file = tmp_path / "written"
    for name, config in (
        ("MeanMetricWrapper", CALLS_A_FUNCTION),
        ("AUC", {"dtype": {"class_name": "DTypePolicy", "module": "keras", "config": {"name": "float16"}}}),
        ("AUC", {"name": CALLS_A_FUNCTION["fn"]}),
        ("MeanMetricWrapper", {"fn": "keras.utils.get_file", "fname": str(file)}),
    ):
        with pytest.raises(InvalidInputError, match=name):
            check(name, **config)
    assert keras.config.epsilon() == epsilon
    assert not file.exists()


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("AUC", {"num_thresholds": 60_000_000}, "from 2 to 10000"),
        ("AUC", {"num_thresholds": True}, "from 2 to 10000"),
        ("AUC", {"num_thresholds": 10.0}, "from 2 to 10000"),
        ("AUC", {"num_thresholds": 10**400}, "from 2 to 10000"),
        ("AUC", {"thresholds": [0.5] * 201}, "a list of 1 to 200"),
        ("AUC", {"thresholds": [[0.5]]}, "a list of 1 to 200"),
        ("AUC", {"thresholds": [float("nan")]}, "a list of 1 to 200"),
        ("AUC", {"multi_label": True, "num_thresholds": 10_000}, "go with multi_label"),
        ("AUC", {"num_labels": 10**9}, "from 1 to 1000"),
        ("AUC", {"curve": "XY"}, "ROC, PR"),
        ("MeanIoU", {"num_classes": 10**6}, "from 1 to 1000"),
        ("Precision", {"thresholds": []}, "thresholds is a list of 0"),
        ("SparseTopKCategoricalAccuracy", {"k": 2**63}, "from 1 to 1000"),
        ("BinaryAccuracy", {"threshold": float("inf")}, "a finite number"),
        ("mae", {"dtype": "int8_from_float32"}, "float16"),
        ("mae", {"name": "a/b"}, "letters"),
        ("mae", {"fn": None}, "takes no 'fn'"),
    ],
)
def test_an_argument_that_is_out_of_bounds_is_refused(name: str, config: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        check(name, **config)


def test_the_metrics_of_one_request_are_bounded() -> None:
    check_metrics([MetricSpec(name="mae")] * MAX_METRICS, ["y"])
    with pytest.raises(InvalidInputError, match="got 33 metrics"):
        check_metrics([MetricSpec(name="mae")] * (MAX_METRICS + 1), ["y"])


def test_the_comparisons_of_a_batch_with_thresholds_are_bounded(make_slot: Callable[..., Slot]) -> None:
    slot = make_slot(sample_models.image_classifier(), replicas=1)
    images, labels, _ = sample_models.image_data(np.random.default_rng(0), 2)
    scorer = slot.scorer([MetricSpec(name="Precision", config={"thresholds": [0.5] * 200})])
    with pytest.raises(InvalidInputError, match="comparisons are made at once"):
        scorer.check(
            Batch(
                inputs={"inputs": np.repeat(images, 20_000, axis=0)},
                targets={"targets": np.repeat(labels, 20_000, axis=0)},
            )
        )
