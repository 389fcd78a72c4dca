"""What outputs are for, by what models are compiled with."""

from __future__ import annotations

from functools import partial
from typing import Any

import keras
import pytest

from understudy.evaluator.model.output_tasks import output_tasks
from understudy.evaluator.types import OutputTask


def own_loss(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.mean(keras.ops.square(y_true - y_pred))


def tasks(width: int | None, metrics: Any, loss: Any = own_loss) -> tuple[str, str]:
    (task,) = output_tasks(loss, ["y"], [width], [metrics, None]).values()
    return task.kind, task.scores


@pytest.mark.parametrize(
    ("width", "metric", "expected"),
    [
        (3, keras.metrics.BinaryAccuracy, ("multilabel", "probabilities")),
        (1, "binary_accuracy", ("binary", "probabilities")),
        (3, partial(keras.metrics.BinaryCrossentropy, from_logits=True), ("multilabel", "logits")),
        (3, keras.metrics.CategoricalAccuracy, ("categorical", "unknown")),
        (3, partial(keras.metrics.SparseTopKCategoricalAccuracy, k=2), ("sparse", "unknown")),
        (3, "accuracy", ("unknown", "unknown")),
        (3, "mae", ("unknown", "unknown")),
    ],
)
@pytest.mark.parametrize("is_serialized", [True, False])
def test_metrics_say_what_an_output_is_for_where_the_loss_does_not(
    width: int, metric: Any, expected: tuple[str, str], *, is_serialized: bool
) -> None:
    made = metric if isinstance(metric, str) else metric()
    given = keras.saving.serialize_keras_object(made) if is_serialized else made
    for metrics in (["mae", given], [["mae", given]], {"y": ["mae", given]}, {"y": given}):
        assert tasks(width, metrics) == expected
    assert tasks(width, [given], loss=None) == expected
    assert tasks(width, [given], loss="mse") == ("regression", "unknown")


def test_each_of_several_outputs_has_its_own_metrics() -> None:
    labels = OutputTask(kind="multilabel", scores="probabilities", loss="own_loss")
    for metrics in ([["mae"], ["binary_accuracy"]], {"b": ["binary_accuracy"]}, [None, "binary_accuracy"]):
        found = output_tasks(own_loss, ["a", "b"], [2, 2], [None, metrics])
        assert (found["a"].kind, found["b"]) == ("unknown", labels)


def test_a_label_holds_beyond_the_threshold_of_its_scores() -> None:
    assert OutputTask(kind="binary", scores="probabilities").threshold == 0.5
    assert OutputTask(kind="multilabel", scores="logits").threshold == 0.0
    assert OutputTask(kind="binary", scores="unknown").threshold == 0.0


@pytest.mark.parametrize("is_serialized", [True, False])
def test_nested_outputs_have_the_losses_and_metrics_of_their_places(*, is_serialized: bool) -> None:
    hinge: Any = keras.losses.CategoricalHinge()
    labels: Any = keras.metrics.BinaryAccuracy()
    if is_serialized:
        hinge, labels = map(keras.saving.serialize_keras_object, (hinge, labels))
    for losses in ({"of": {"b": hinge, "a": own_loss}, "z": "mse"}, [[own_loss, hinge], "mse"]):
        for names in (["of/a", "of/b", "z"], ["a", "b", "z"]):
            found = output_tasks(losses, names, [2, 2, 1], [{"of": {"a": [labels]}, "z": ["mae"]}, None])
            assert [task.kind for task in found.values()] == ["multilabel", "categorical", "regression"]
    assert output_tasks({"of": {"a": "mse"}}, ["a", "b"], [2, 2], [[{"a": labels}]])["b"].kind == "unknown"
