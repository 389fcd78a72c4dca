"""Other people's checkpoints, as stock Keras and TensorFlow write them, scored and served on several replicas."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from click.testing import CliRunner, Result

from testkit.real_run import WAIT_SECONDS, Told, outcomes, wait_for_records
from understudy.checkpoints import FolderSource
from understudy.checkpoints.kinds import ModelKind
from understudy.cli.main import main
from understudy.evaluator.datasets.dataset import ArrayDataset
from understudy.evaluator.evaluator import Evaluator
from understudy.evaluator.evaluator_errors import LoadError, NotEvaluableError
from understudy.evaluator.model.export import CheckpointExporter, ExportFormat
from understudy.evaluator.model.loaders import loader_for
from understudy.evaluator.settings import EvaluatorSettings
from understudy.evaluator.types import Batch, EvaluationOutcome, MetricSpec

pytestmark = pytest.mark.usefixtures("logical_cpus")

ROWS = 7
RANDOM = np.random.default_rng(3)
X = RANDOM.normal(size=(ROWS, 4)).astype(np.float32)
Y = RANDOM.normal(size=(ROWS, 2)).astype(np.float32)

EXPERIMENT = """
class Theirs:
    name = "theirs"
    global_batch_size = 7
    build_model = staticmethod(build_model)

    def training_data(self):
        raise NotImplementedError

    evaluation_data = training_data
"""

Save = Callable[[Any, Path, int], None]


def build_model() -> Any:
    """Return a compiled model with much that a format must carry: statistics, a seed, a loss and a metric object."""
    x = keras.Input((4,), name="x")
    h = keras.layers.BatchNormalization()(keras.layers.Dense(8, activation="relu")(x))
    y = keras.layers.Dense(2)(keras.layers.Dropout(0.3)(h))
    model = keras.Model(x, y)
    model.compile("adam", keras.losses.Huber(), metrics=[keras.metrics.MeanAbsoluteError(name="mae")])
    return model


def save_keras(model: Any, folder: Path, step: int) -> None:
    callback = keras.callbacks.ModelCheckpoint(str(folder / "model-{epoch}.keras"))
    callback.set_model(model)
    callback.on_epoch_end(step, {})


def save_weights(model: Any, folder: Path, step: int) -> None:
    callback = keras.callbacks.ModelCheckpoint(str(folder / "model-{epoch}.weights.h5"), save_weights_only=True)
    callback.set_model(model)
    callback.on_epoch_end(step, {})


def save_h5(model: Any, folder: Path, step: int) -> None:
    model.save(folder / f"model-{step}.h5")


def save_managed(model: Any, folder: Path, step: int) -> None:
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer, step=tf.Variable(step))
    tf.train.CheckpointManager(checkpoint, str(folder), max_to_keep=3).save(step)


def save_model_itself(model: Any, folder: Path, step: int) -> None:
    tf.train.Checkpoint(model).write(str(folder / f"at-{step}"))


def save_under_another_name(model: Any, folder: Path, step: int) -> None:
    tf.train.Checkpoint(net=model, opt=model.optimizer).write(str(folder / f"at-{step}"))


def save_numbered(model: Any, folder: Path, step: int) -> None:
    model.export(folder / str(step), verbose=False)


def save_ckpt_n(model: Any, folder: Path, step: int) -> None:
    tf.saved_model.save(model, str(folder / f"ckpt-{step}"))


def of_keras_2(model: Any, step: int) -> Any:
    """Return the model as a script with Keras 2 would have it."""
    x = tf_keras.Input((4,), name="x")
    h = tf_keras.layers.BatchNormalization()(tf_keras.layers.Dense(8, activation="relu")(x))
    y = tf_keras.layers.Dense(2)(tf_keras.layers.Dropout(0.3)(h))
    same = tf_keras.Model(x, y)
    for own, other in zip(same.layers, model.layers, strict=True):
        own.set_weights(other.get_weights())
    same.compile("adam", tf_keras.losses.Huber(), metrics=[tf_keras.metrics.MeanAbsoluteError(name="mae")])
    same.optimizer.build(same.trainable_variables)
    same.optimizer.iterations.assign(step)
    return same


def save_keras_of_keras_2(model: Any, folder: Path, step: int) -> None:
    of_keras_2(model, step).save(folder / f"model-{step}.keras")


def save_h5_of_keras_2(model: Any, folder: Path, step: int) -> None:
    with pytest.warns(UserWarning, match="HDF5"):
        of_keras_2(model, step).save(folder / f"model-{step}.h5")


def save_folder_of_keras_2(model: Any, folder: Path, step: int) -> None:
    of_keras_2(model, step).save(folder / f"model-{step}")  # what its ModelCheckpoint does, too


COMPILED: dict[str, Save] = {
    "keras": save_keras,
    "weights.h5": save_weights,
    "h5": save_h5,
    "CheckpointManager": save_managed,
    "Checkpoint of the model": save_model_itself,
    "Checkpoint under another name": save_under_another_name,
    "keras of Keras 2": save_keras_of_keras_2,
    "h5 of Keras 2": save_h5_of_keras_2,
}
COMPILED_SAVED_MODEL = "SavedModel of Keras 2"
SAVED_MODELS: dict[str, Save] = {"numbered": save_numbered, "ckpt-N": save_ckpt_n}


@dataclass(frozen=True)
class Trained:
    """The variables of the model and its optimizer at a step, and what one device makes of that model."""

    variables: Sequence[Any]
    metrics: dict[str, float]
    outputs: Any


@functools.cache
def training() -> tuple[Any, Mapping[int, Trained]]:
    """Train a model once for all tests; return it, and what it was at each step."""
    model = build_model()
    steps = {}
    for step in range(1, 6):
        model.train_on_batch(X, Y)
        variables = [variable.numpy() for variable in variables_of(model)]
        metrics = model.evaluate(X, Y, batch_size=ROWS, return_dict=True, verbose=0)
        steps[step] = Trained(variables, metrics, model(X).numpy())
    return model, steps


def variables_of(model: Any) -> list[Any]:
    return [*model.variables, *model.optimizer.variables]


class Theirs:
    """A training script of somebody else's, and an evaluator beside it."""

    def __init__(self, folder: Path, save: Save) -> None:
        self.folder = folder / "theirs"
        self.folder.mkdir()
        self._save = save
        self.state = folder / "state"
        self.model, self._steps = training()
        self.told = Told()

    def train_and_save(self, step: int) -> tuple[dict[str, float], Any]:
        """Save the model as it was at a step of the training; return what one device makes of the model."""
        trained = self._steps[step]
        for variable, value in zip(variables_of(self.model), trained.variables, strict=True):
            variable.assign(value)
        self._save(self.model, self.folder, step)
        return trained.metrics, trained.outputs

    def export(self, output: Path, form: ExportFormat) -> Path:
        """Export the newest checkpoint that the evaluator holds."""
        store = CheckpointExporter(run_dir=None, state_dir=self.state, build_model=build_model)
        return store.export(store.resolve("latest"), output, form)

    def evaluator(self) -> Evaluator:
        return Evaluator(
            EvaluatorSettings(
                state_dir=self.state, devices=("CPU:0", "CPU:1"), poll_interval_seconds=0.05, max_batch_size=8
            ),
            source=FolderSource(self.folder, self.state / "staging", takes_variables=True),
            datasets=[ArrayDataset("test", {"x": X, "y": Y})],
            build_model=build_model,
            observer=self.told,
        )


@pytest.mark.parametrize("name", [*COMPILED, COMPILED_SAVED_MODEL])
def test_a_checkpoint_of_every_compiled_format_scores_predicts_and_is_exported_as_its_writer_s_model(
    tmp_path: Path, name: str
) -> None:
    theirs = Theirs(tmp_path, COMPILED.get(name, save_folder_of_keras_2))
    expected = {3: theirs.train_and_save(3)}
    with theirs.evaluator() as evaluator:
        wait_for_records(evaluator, 1)
        expected[5] = theirs.train_and_save(5)
        records = wait_for_records(evaluator, 2)

        assert outcomes(records) == [(step, "test", EvaluationOutcome.SCORED) for step in (3, 5)]
        for record in records:
            assert dict(record.metrics) == pytest.approx(expected[record.step][0], rel=1e-5)
        prediction = evaluator.predict({"x": X}).result(WAIT_SECONDS)
        assert prediction.step == 5
        np.testing.assert_allclose(next(iter(prediction.outputs.values())), expected[5][1], rtol=1e-5, atol=1e-6)
    if name in COMPILED:
        assert_is_exported(theirs, tmp_path, *expected[5])


def assert_is_exported(theirs: Theirs, folder: Path, expected: dict[str, float], outputs: Any) -> None:
    """Export the newest checkpoint as a Keras file and as a SavedModel, and check what they score and give."""
    loaded = keras.saving.load_model(theirs.export(folder / "out.keras", "keras"))
    np.testing.assert_array_equal(loaded(X).numpy(), outputs)
    loaded.run_eagerly = True
    assert loaded.evaluate(X, Y, batch_size=ROWS, return_dict=True, verbose=0) == pytest.approx(expected, rel=1e-6)
    saved_model = tf.saved_model.load(str(theirs.export(folder / "out", "saved_model")))
    answers = saved_model.signatures["serving_default"](x=tf.constant(X))
    np.testing.assert_allclose(next(iter(answers.values())).numpy(), outputs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", SAVED_MODELS)
def test_a_saved_model_serves_scores_with_named_metrics_only_and_is_exported_as_it_is(
    tmp_path: Path, name: str
) -> None:
    theirs = Theirs(tmp_path, SAVED_MODELS[name])
    theirs.train_and_save(3)
    with theirs.evaluator() as evaluator:
        (record,) = wait_for_records(evaluator, 1)
        assert (record.step, record.outcome) == (3, EvaluationOutcome.FAILED)
        assert "no compile configuration" in record.reason
        expected, outputs = theirs.train_and_save(5)
        wait_for_records(evaluator, 2)

        (x,) = evaluator.metadata().signature.inputs
        prediction = evaluator.predict({x.name: X}).result(WAIT_SECONDS)
        assert prediction.step == 5
        np.testing.assert_allclose(next(iter(prediction.outputs.values())), outputs, rtol=1e-5, atol=1e-6)
        with pytest.raises(NotEvaluableError, match="no compile configuration"):
            evaluator.open_stream().result(WAIT_SECONDS)
        with evaluator.open_stream(metrics=[MetricSpec(name="mean_absolute_error")]).result(WAIT_SECONDS) as stream:
            for rows in (slice(0, 3), slice(3, ROWS)):
                stream.add(Batch(inputs={x.name: X[rows]}, targets={"targets": Y[rows]})).result(WAIT_SECONDS)
            metrics = stream.finish().metrics
        assert metrics == pytest.approx({"mean_absolute_error": expected["mae"]}, rel=1e-5)

    serve = tf.saved_model.load(str(theirs.export(tmp_path / "out", "saved_model"))).signatures["serving_default"]
    (argument,) = serve.structured_input_signature[1]
    answers = serve(**{argument: tf.constant(X)})
    np.testing.assert_allclose(next(iter(answers.values())).numpy(), outputs, rtol=1e-6, atol=1e-7)
    with pytest.raises(LoadError, match="export it as saved_model"):
        theirs.export(tmp_path / "out.keras", "keras")
    assert not (tmp_path / "out.keras").exists()


def test_variables_of_another_model_are_refused_with_the_reason(tmp_path: Path) -> None:
    theirs = Theirs(tmp_path, save_managed)
    theirs.model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    theirs.model.compile("adam", "mse")
    save_managed(theirs.model, theirs.folder, 1)
    with theirs.evaluator() as evaluator:
        (record,) = wait_for_records(evaluator, 1)
        assert record.outcome is EvaluationOutcome.FAILED
        assert "not those of the experiment's model" in record.reason


def test_variables_that_keras_2_saved_as_a_checkpoint_are_refused_with_a_way_out(tmp_path: Path) -> None:
    prefix = tmp_path / "weights"
    of_keras_2(build_model(), 3).save_weights(prefix)

    with pytest.raises(LoadError, match=r"Keras 2 saved them, .*have it save \.weights\.h5 files or whole models"):
        loader_for(ModelKind.TF_CHECKPOINT, build_model).build(prefix)


def test_the_weights_of_keras_2_fit_the_experiment_s_model(tmp_path: Path) -> None:
    model, file = build_model(), tmp_path / "model.weights.h5"
    model.train_on_batch(X, Y)
    of_keras_2(model, 3).save_weights(file)

    built = loader_for(ModelKind.WEIGHTS, build_model).build(file).model

    np.testing.assert_array_equal(built(X), model(X))


def test_variables_are_not_exported_without_their_model(tmp_path: Path) -> None:
    theirs = Theirs(tmp_path, save_weights)
    theirs.train_and_save(3)
    with theirs.evaluator() as evaluator:
        wait_for_records(evaluator, 1)
    options = ["--checkpoints", theirs.folder, "--state-dir", theirs.state, "--step", "latest"]

    def export(*more: str | Path) -> Result:
        return CliRunner().invoke(main, ["export", *map(str, (*options, "--output", tmp_path / "out.keras", *more))])

    refused = export()
    assert (refused.exit_code, "give the experiment" in refused.stderr) == (1, True)
    (tmp_path / "theirs.py").write_text(
        f"from typing import Any\nimport keras\n{inspect.getsource(build_model)}{EXPERIMENT}"
    )
    allowed = export("--experiment", f"{tmp_path / 'theirs.py'}:Theirs")
    assert allowed.exit_code == 0, allowed.output
    np.testing.assert_array_equal(keras.saving.load_model(tmp_path / "out.keras")(X).numpy(), theirs.model(X).numpy())
