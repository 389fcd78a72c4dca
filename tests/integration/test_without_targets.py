"""Servers of models whose loss needs no targets, or targets of some outputs only: auto-encoders, embeddings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from click.testing import CliRunner
from integration.conftest import Run

from testkit.in_process import until
from understudy.cli.main import main
from understudy.clients import InvalidArgumentError

RANDOM = np.random.default_rng(5)
X = RANDOM.normal(size=(10, 4)).astype(np.float32)
Y = RANDOM.normal(size=(10, 2)).astype(np.float32)


@keras.saving.register_keras_serializable("without_targets")
class AutoEncoder(keras.Model):  # type: ignore[misc]
    """Is compiled without a loss: its own step compares its outputs with its inputs."""

    def test_step(self, data: Any) -> Any:
        x, _, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        self._loss_tracker.update_state(
            keras.losses.mean_squared_error(x, self(x, training=False)), sample_weight=sample_weight
        )
        return self.get_metrics_result()


def auto_encoder() -> Any:
    x = keras.Input((4,), name="x")
    model = AutoEncoder(x, keras.layers.Dense(4, name="again")(x))
    model.compile("sgd", loss="mse")
    return model


def adds_loss() -> Any:
    x = keras.Input((4,), name="x")
    model = keras.Model(x, keras.layers.ActivityRegularization(l2=0.5, name="code")(keras.layers.Dense(2)(x)))
    model.compile("sgd")
    return model


def with_embedding() -> Any:
    x = keras.Input((4,), name="x")
    embedding = keras.layers.Dense(3, name="embedding")(x)
    model = keras.Model(x, {"embedding": embedding, "value": keras.layers.Dense(2, name="value")(embedding)})
    model.compile("sgd", loss={"value": "mse"})
    return model


def write_records(file: Path, arrays: dict[str, Any]) -> None:
    with tf.io.TFRecordWriter(str(file)) as writer:
        for row in range(len(X)):
            values = {name: tf.train.Feature(float_list={"value": array[row]}) for name, array in arrays.items()}
            writer.write(tf.train.Example(features={"feature": values}).SerializeToString())


def evaluation_data(folder: Path, targets: dict[str, Any]) -> dict[str, Path]:
    """Write the same examples in each format."""
    np.savez(folder / "arrays.npz", allow_pickle=False, x=X, **targets)
    write_records(folder / "records.tfrecord", {"x": X, **targets})
    elements = (X, targets) if targets else X
    tf.data.Dataset.from_tensor_slices(elements).save(str(folder / "saved"))
    return {
        "arrays": folder / "arrays.npz",
        "records": folder / "records.tfrecord",
        "saved": folder / "saved",
    }


@pytest.mark.parametrize(("build", "targets"), [(auto_encoder, {}), (adds_loss, {}), (with_embedding, {"value": Y})])
def test_examples_need_only_the_targets_that_the_model_is_scored_on(
    run_service: Run, tmp_path: Path, build: Callable[[], Any], targets: dict[str, Any]
) -> None:
    model = build()
    (tmp_path / "theirs").mkdir()
    model.save(tmp_path / "theirs" / "epoch-1.keras")
    expected: Any = pytest.approx(model.evaluate(X, targets or None, return_dict=True, verbose=0), rel=1e-6)
    data = evaluation_data(tmp_path, targets)
    service = run_service({"checkpoints": tmp_path / "theirs", "eval_data": data}, {"tables": True})
    service.wait_ready()
    client = service.client()

    until(lambda: len(list(client.list_evaluations())) == len(data))
    recorded: dict[str, Any] = {
        entry.dataset: (entry.reason, dict(entry.metrics)) for entry in client.list_evaluations()
    }
    command = ["evaluate", str(data["arrays"]), "--target", service.grpc, "--json"]
    of_file = CliRunner().invoke(main, command)

    assert recorded == dict.fromkeys(data, ("", expected))
    assert client.evaluate([(X, targets)]).metrics == expected
    assert json.loads(of_file.stdout)["metrics"] == expected, of_file.output
    if not targets:
        with pytest.raises(
            InvalidArgumentError, match=r"'label' to slice by, because .* no targets; there are (?!label)"
        ):
            client.evaluate([(X,)], slices=["label"])
        assert client.evaluate([(X,)]).metrics == client.evaluate([(X, None)]).metrics == expected


@pytest.mark.parametrize(
    ("losses", "targets", "missed"),
    [
        ({"value": "mse"}, {}, "there are no targets of 'embedding', 'value', which the model's loss and metrics need"),
        ({"value": "mse", "embedding": "mse"}, {"value": Y}, "there are none of 'embedding'"),
    ],
)
def test_targets_that_the_loss_needs_are_missed_by_name(
    run_service: Run, tmp_path: Path, losses: dict[str, str], targets: dict[str, Any], missed: str
) -> None:
    model = with_embedding()
    model.compile("sgd", losses)
    (tmp_path / "theirs").mkdir()
    model.save(tmp_path / "theirs" / "epoch-1.keras")
    data = evaluation_data(tmp_path, targets)
    service = run_service({"checkpoints": tmp_path / "theirs", "eval_data": data})
    service.wait_ready()
    client = service.client()

    until(lambda: len(list(client.list_evaluations())) == len(data))

    for entry in client.list_evaluations():
        assert (entry.outcome, missed in entry.reason) == ("failed", True), entry.reason
    with pytest.raises(InvalidArgumentError, match=missed):
        client.evaluate([(X, targets or None)])
