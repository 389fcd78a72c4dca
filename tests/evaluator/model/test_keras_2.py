"""Models that Keras 2 saved, as tf_keras writes them: the same outputs and the same scores on Keras 3."""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st

from understudy.checkpoints.formats.saved_model import KERAS_METADATA_FILE
from understudy.checkpoints.kinds import ModelKind
from understudy.evaluator.evaluator_errors import LoadError
from understudy.evaluator.model.loaders import BuiltModel, keras_metadata, loader_for
from understudy.evaluator.model.loaders.keras_2 import UntranslatableError, translated, translated_compilation
from understudy.evaluator.model.loaders.keras_metadata import read_compilation
from understudy.evaluator.model.loaders.stored_config import StoredConfig

layers = tf_keras.layers
IMAGE, SEQUENCE, VECTOR = (8, 8, 3), (6, 4), (5,)
KINDS = {".keras": ModelKind.KERAS, ".h5": ModelKind.HDF5}

formats = pytest.mark.parametrize("suffix", KINDS)


def input_of(shape: tuple[int, ...], dtype: str = "float32") -> Any:
    return tf_keras.Input(shape, name="x", dtype=dtype)


def chain(shape: tuple[int, ...], *chained: Any) -> Any:
    inputs = outputs = input_of(shape)
    for layer in chained:
        outputs = layer(outputs)
    return tf_keras.Model(inputs, outputs)


def convolutions() -> Any:
    return chain(
        IMAGE,
        layers.Rescaling(1 / 255),
        layers.RandomFlip(),
        layers.RandomRotation(0.1),
        layers.ZeroPadding2D(1),
        layers.Conv2D(4, 3, padding="same", kernel_regularizer="l2", bias_constraint="non_neg"),
        layers.BatchNormalization(),
        layers.LeakyReLU(0.2),
        layers.DepthwiseConv2D(3),
        layers.SeparableConv2D(4, 3, activation=layers.ReLU(6.0)),
        layers.SpatialDropout2D(0.2),
        layers.Conv2DTranspose(4, 3),
        layers.GroupNormalization(2),
        layers.UpSampling2D(2, interpolation="bilinear"),
        layers.Cropping2D(1),
        layers.PReLU(),
        layers.MaxPooling2D(),
        layers.GlobalAveragePooling2D(),
        layers.Dense(3, activation="softmax", dtype="mixed_bfloat16"),
    )


def recurrent() -> Any:
    inputs = input_of(SEQUENCE)
    encoded, *state = layers.LSTM(3, return_sequences=True, return_state=True)(layers.Masking(0.0)(inputs))
    decoded = layers.LSTM(3, return_sequences=True)(encoded, initial_state=state)
    both = layers.Bidirectional(layers.GRU(2, return_sequences=True))(decoded)
    cells = layers.RNN([layers.LSTMCell(3), layers.GRUCell(2)])(both)
    return tf_keras.Model(inputs, [layers.TimeDistributed(layers.Dense(2))(decoded), cells])


def attention() -> Any:
    inputs = input_of(SEQUENCE)
    query = layers.Dense(4)(layers.LayerNormalization()(inputs))
    mixed, scores = layers.MultiHeadAttention(2, 3)(query, inputs, return_attention_scores=True)
    return tf_keras.Model(inputs, [layers.Add()([mixed, query]), scores, layers.Attention()([query, inputs])])


def words() -> Any:
    inputs = input_of((6,), "int32")
    return tf_keras.Model(inputs, layers.LSTM(3)(layers.Embedding(7, 4, mask_zero=True, input_length=6)(inputs)))


def nested() -> Any:
    """A functional model and two sequential ones, one without inputs of its own, that are called repeatedly."""
    own = tf_keras.Input(VECTOR)
    functional = tf_keras.Model(own, layers.Dense(5, activation="relu")(own), name="functional")
    sequential = tf_keras.Sequential([layers.InputLayer(VECTOR), layers.Dense(5), layers.BatchNormalization()])
    sequential.compile("adam", "mse")
    without_input = tf_keras.Sequential([layers.Dense(5)])
    inputs = input_of(VECTOR)
    first = sequential(without_input(inputs))
    joined = layers.Subtract()([functional(sequential(first)), functional(inputs)])
    return tf_keras.Model(inputs, {"joined": layers.Dense(1, name="joined")(joined), "first": first})


def stacked() -> Any:
    inner = tf_keras.Sequential([chain(VECTOR, layers.Dense(3)), layers.Dense(2, input_shape=(3,))])
    return tf_keras.Sequential([tf_keras.Sequential([layers.Dense(5, input_shape=VECTOR)]), inner])


MODELS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "convolutions": (convolutions, IMAGE),
    "recurrent": (recurrent, SEQUENCE),
    "attention": (attention, SEQUENCE),
    "words": (words, (6,)),
    "nested": (nested, VECTOR),
    "stacked": (stacked, VECTOR),
}


@functools.cache
def model_of(name: str) -> Any:
    """Build a model, which is saved in several formats, once."""
    return MODELS[name][0]()


def save(model: Any, file: Path) -> Path:
    with pytest.warns(UserWarning, match="HDF5") if file.suffix == ".h5" else contextlib.nullcontext():
        model.save(file)
    return file


def build(file: Path) -> BuiltModel:
    return loader_for(KINDS[file.suffix], None).build(file)


def change_weights(model: Any, seed: int) -> None:
    drawn = np.random.default_rng(seed)
    model.set_weights([drawn.uniform(0.1, 0.9, weight.shape).astype(weight.dtype) for weight in model.get_weights()])


@formats
@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_the_same_and_takes_the_weights_of_the_next_checkpoint(
    name: str, suffix: str, tmp_path: Path
) -> None:
    model, (_, shape) = model_of(name), MODELS[name]
    x = np.random.default_rng(0).integers(0, 7, (3, *shape)).astype(model.input.dtype.name)
    loader = loader_for(KINDS[suffix], None)
    built, fingerprints = None, set()
    for seed in (1, 2):
        change_weights(model, seed)
        file = save(model, tmp_path / f"{seed}{suffix}")
        fingerprints.add(loader.architecture_of(file))
        if built is None:
            built = loader.build(file).model
        else:
            assert loader.assign(built, file)
        for found, expected in zip(
            tf.nest.flatten(built(x, training=False)), tf.nest.flatten(model(x, training=False)), strict=True
        ):
            np.testing.assert_allclose(tf.cast(found, tf.float64), tf.cast(expected, tf.float64), rtol=1e-4, atol=1e-5)
    assert len(fingerprints) == 1


METRICS = tf_keras.metrics
LOSSES = tf_keras.losses
SCORED: dict[str, tuple[int, str | None, Callable[[], tuple[Any, list[Any]]]]] = {
    "binary": (
        1,
        "sigmoid",
        lambda: (
            LOSSES.BinaryCrossentropy(label_smoothing=0.1),
            ["accuracy", METRICS.AUC(name="auc"), METRICS.Precision(0.4, name="precision"), METRICS.Hinge()],
        ),
    ),
    "regression": (1, None, lambda: (LOSSES.Huber(0.5), ["mae", METRICS.RootMeanSquaredError(), METRICS.R2Score()])),
    "sum": (1, None, lambda: (LOSSES.MeanSquaredError(reduction="sum"), ["mse"])),
    "logits": (
        3,
        None,
        lambda: (
            LOSSES.SparseCategoricalCrossentropy(from_logits=True),
            ["acc", METRICS.SparseTopKCategoricalAccuracy(2, name="top")],
        ),
    ),
    "classes": (
        3,
        "softmax",
        lambda: (
            "categorical_crossentropy",
            ["accuracy", METRICS.TopKCategoricalAccuracy(2), METRICS.F1Score(average="macro"), METRICS.KLDivergence()],
        ),
    ),
}


def scores(model: Any, x: Any, y: Any, **options: Any) -> dict[str, float]:
    """Return a compiled model's scores, without tracing it."""
    model.run_eagerly = True
    return dict(model.evaluate(x, y, verbose=0, return_dict=True, **options))


@dataclass(frozen=True)
class Scored:
    """A trained model of Keras 2, and its scores without and with weights."""

    model: Any
    data: tuple[Any, Any]
    weights: Any
    scores: list[dict[str, float]]


@functools.cache
def scored(name: str) -> Scored:
    """Train and score a model, which is saved in several formats, once."""
    width, activation, compilation = SCORED[name]
    loss, metrics = compilation()
    draw = np.random.default_rng(0)
    x, labels = draw.normal(size=(40, 5)).astype(np.float32), draw.integers(0, 3, 40)
    y = {1: (labels > 0).astype(np.float32)[:, None], 3: labels}[width] if name != "classes" else np.eye(3)[labels]
    weights = draw.uniform(0.1, 2, 40).astype(np.float32)
    model = chain(VECTOR, layers.Dense(4, activation="tanh"), layers.Dense(width, activation=activation))
    model.compile("adam", loss, metrics=metrics)
    model.run_eagerly = True
    model.fit(x, y, batch_size=40, verbose=0)
    return Scored(model, (x, y), weights, [scores(model, x, y, sample_weight=each) for each in (None, weights)])


@formats
@pytest.mark.parametrize("name", SCORED)
def test_a_model_is_scored_by_its_loss_and_its_metrics(name: str, suffix: str, tmp_path: Path) -> None:
    given = scored(name)

    built = build(save(given.model, tmp_path / f"model{suffix}"))

    compile_as_saved(built)
    for weights, expected in zip((None, given.weights), given.scores, strict=True):
        assert scores(built.model, *given.data, sample_weight=weights) == pytest.approx(expected, rel=2e-6), weights


def compile_as_saved(built: BuiltModel) -> None:
    arguments = keras.saving.deserialize_keras_object(dict(built.compile_config))
    built.model.compile(**{**arguments, "optimizer": None})


@formats
@pytest.mark.parametrize("given", [dict, lambda metrics: list(metrics.values())], ids=["by name", "in order"])
def test_the_metrics_of_several_outputs_keep_their_names(
    given: Callable[[dict[str, Any]], Any], suffix: str, tmp_path: Path
) -> None:
    inputs = input_of(VECTOR)
    model = tf_keras.Model(inputs, [layers.Dense(1, name=name)(inputs) for name in ("first", "second")])
    metrics = {"first": ["mae", METRICS.AUC(name="auc")], "second": "mse"}
    model.compile("adam", ["mse", "mae"], metrics=given(metrics), loss_weights=[2, 0.5])
    x, y = np.ones((4, 5), np.float32), [np.array([[0.0], [1], [1], [0]])] * 2
    expected = scores(model, x, y)

    built = build(save(model, tmp_path / f"model{suffix}"))

    compile_as_saved(built)
    assert scores(built.model, x, y) == pytest.approx(expected, rel=2e-6)


def test_a_saved_model_of_several_outputs_is_scored_by_what_was_saved_beside_it(tmp_path: Path) -> None:
    inputs = input_of(VECTOR)
    model = tf_keras.Model(inputs, [layers.Dense(1, name=name)(inputs) for name in ("first", "second")])
    model.compile("adam", ["mse", "mae"], metrics=[["mae", METRICS.AUC(thresholds=[0.2, 0.4], name="auc")], ["mse"]])
    x, y = np.ones((4, 5), np.float32), [np.array([[0.0], [1], [1], [0]])] * 2
    expected = model.evaluate(x, y, verbose=0, return_dict=True)
    model.save(tmp_path / "model")

    built = loader_for(ModelKind.SAVED_MODEL, None).build(tmp_path / "model")

    compile_as_saved(built)
    assert scores(built.model, {"x": x}, dict(zip(("first", "second"), y, strict=True))) == pytest.approx(
        expected, rel=2e-6
    )


def test_a_saved_model_is_served_without_a_score_if_its_losses_are_not_accepted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = chain(VECTOR, layers.Dense(1))
    model.compile("adam", OwnLoss())
    model.evaluate(np.ones((4, 5)), np.ones((4, 1)), verbose=0)
    model.save(tmp_path / "model")

    built = loader_for(ModelKind.SAVED_MODEL, None).build(tmp_path / "model")

    assert not built.compile_config
    assert "cannot be scored by the losses and metrics that were saved with it" in caplog.text
    assert "OwnLoss" in caplog.text


class OwnLoss(tf_keras.losses.Loss):  # type: ignore[misc]
    """A loss that only the script knows."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Return the losses of the examples."""
        return tf.abs(y_true - y_pred)[:, 0]


def hard_sigmoid() -> Any:
    return chain((3, 6, 6, 2), layers.ConvLSTM2D(2, 3))


def operations_of_tensorflow() -> Any:
    inputs = input_of(VECTOR)
    return tf_keras.Model(inputs, tf.nn.relu(inputs))


def layer_that_is_gone() -> Any:
    return chain(VECTOR, layers.ThresholdedReLU(0.5))


@formats
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (hard_sigmoid, "it uses the activation hard_sigmoid, which Keras 3 computes in another way"),
        (operations_of_tensorflow, "TFOpLambda"),
        (layer_that_is_gone, "ThresholdedReLU"),
    ],
)
def test_what_keras_3_does_not_have_is_refused_with_a_way_out(
    make: Callable[[], Any], reason: str, suffix: str, tmp_path: Path
) -> None:
    with pytest.raises(LoadError, match=rf"{reason}.*save it with Keras 3, or as a SavedModel"):
        build(save(make(), tmp_path / f"model{suffix}"))


def test_vocabularies_are_refused_with_a_way_out(tmp_path: Path) -> None:
    lookup = layers.StringLookup()
    lookup.adapt(np.array(["a", "b"]))
    inputs = input_of((1,), "string")

    with pytest.raises(LoadError, match=r"has vocabularies; save it with Keras 3, or as a SavedModel"):
        build(save(tf_keras.Model(inputs, lookup(inputs)), tmp_path / "model.keras"))


class Doubling2(tf_keras.layers.Layer):  # type: ignore[misc]
    """A layer of the script's own."""

    def call(self, x: Any) -> Any:
        """Return twice the input."""
        return 2 * x


class Doubling3(keras.layers.Layer):  # type: ignore[misc]
    """The same on Keras 3, as an experiment registers it."""

    def call(self, x: Any) -> Any:
        """Return twice the input."""
        return 2 * x


@formats
def test_a_layer_of_one_s_own_is_the_one_that_the_experiment_registered(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Doubling2, "__module__", "__main__")  # as in a script
    tf_keras.saving.register_keras_serializable("tests", "Doubling")(Doubling2)
    model = chain(VECTOR, Doubling2(), layers.Dense(2))
    file = save(model, tmp_path / f"model{suffix}")
    with pytest.raises(LoadError, match=r"Doubling.*--experiment"):
        build(file)

    monkeypatch.setitem(keras.saving.get_custom_objects(), "tests>Doubling", Doubling3)

    x = np.ones((3, 5), np.float32)
    file.touch()  # a checkpoint that was refused is checked again when its file changes
    np.testing.assert_allclose(build(file).model(x), model(x), rtol=1e-6)


class OfKeras2(tf_keras.layers.Layer):  # type: ignore[misc]
    """A layer with layers in nested lists, which Keras 2 does not save."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.inner = [[layers.Dense(5)]]

    def call(self, x: Any) -> Any:
        """Return the result of the inner layer."""
        return self.inner[0][0](x)


class OfKeras3(keras.layers.Layer):  # type: ignore[misc]
    """The same on Keras 3."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.inner = [[keras.layers.Dense(5)]]

    def build(self, shape: Any) -> None:
        """Create the weights."""
        self.inner[0][0].build(shape)

    def call(self, x: Any) -> Any:
        """Return the result of the inner layer."""
        return self.inner[0][0](x)


@pytest.mark.filterwarnings("ignore:Skipping nested container")
def test_weights_that_the_file_lacks_are_not_left_as_they_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tf_keras.saving.register_keras_serializable("tests", "Nested")(OfKeras2)
    monkeypatch.setitem(keras.saving.get_custom_objects(), "tests>Nested", OfKeras3)
    file = save(chain(VECTOR, OfKeras2()), tmp_path / "model.keras")

    with pytest.raises(LoadError, match=r"it has \d variables, and the model 2; save it with Keras 3"):
        build(file)


KEYS = st.sampled_from(
    ["class_name", "config", "module", "layers", "name", "axis", "inbound_nodes", "output_layers", "batch_input_shape"]
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2)
    | st.sampled_from(["Sequential", "Dense", "Model", "keras.layers", "__tuple__"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=30,
)


@given(st.dictionaries(KEYS, VALUES))
def test_any_configuration_is_translated_or_refused(config: dict[str, Any]) -> None:
    before = json.dumps(config)
    for translate in (translated, lambda any_config: translated_compilation(any_config, any_config)):
        with contextlib.suppress(UntranslatableError):
            translate(config)
    assert json.dumps(config) == before


@given(model=st.dictionaries(KEYS, VALUES), compilation=st.dictionaries(KEYS, VALUES))
def test_any_configuration_has_a_fingerprint_or_is_refused(model: dict[str, Any], compilation: dict[str, Any]) -> None:
    with contextlib.suppress(LoadError):
        assert StoredConfig(model=model, compilation=compilation).fingerprint


@given(metadata=st.dictionaries(KEYS | st.just("training_config"), VALUES) | VALUES)
def test_any_metadata_of_a_saved_model_are_read_or_refused(metadata: Any) -> None:
    node = {"nodePath": "root", "metadata": json.dumps(metadata)}
    with tempfile.TemporaryDirectory() as folder:
        message = json_format.ParseDict({"nodes": [node]}, keras_metadata.SavedMetadata())
        Path(folder, KERAS_METADATA_FILE).write_bytes(message.SerializeToString())
        with contextlib.suppress(LoadError):
            read_compilation(Path(folder))
