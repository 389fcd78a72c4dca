"""Slots take up one checkpoint after another."""

from __future__ import annotations

import gc
import weakref
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from testkit import sample_models
from understudy.evaluator.evaluator_errors import ArchitectureMismatchError, LoadError
from understudy.evaluator.model.loaders.stored_config import read_archive
from understudy.evaluator.model.slot import Slot
from understudy.evaluator.types import Arrays, Batch


def saved(model: Any, folder: Path, name: str = "model") -> Path:
    path = folder / name / "model.keras"
    path.parent.mkdir()
    model.save(path)
    return path


def scored(slot: Slot, inputs: Any, targets: Any) -> dict[str, float]:
    scorer = slot.scorer()
    batch = Batch(inputs={slot.signature.inputs[0].name: inputs}, targets={"targets": targets})
    return scorer.result(scorer.update(scorer.start(), batch))


def trained_further(model: Any) -> Any:
    """Change every weight, as another epoch would."""
    rng = np.random.default_rng(3)
    for variable in model.weights:
        if "seed" not in variable.path:
            variable.assign(variable + rng.uniform(0.0, 0.1, variable.shape).astype(np.float32))
    return model


def test_a_recurrent_layer_that_keeps_its_state_between_batches_is_refused(
    strategy: Callable[[int], Any], tmp_path: Path
) -> None:
    sequence = keras.Input(batch_shape=(1, 5, 3))
    inner = keras.Sequential([layers.GRU(4, stateful=True, name="memory"), layers.Dense(1)])
    with pytest.raises(
        LoadError, match=r"\['memory'\] keep their state .* expected stateful=False; build the model so"
    ):
        Slot(strategy(1), saved(keras.Model(sequence, inner(sequence)), tmp_path), max_batch_size=32)


def test_weights_are_swapped_without_a_trace_or_a_rebuild(strategy: Callable[[int], Any], tmp_path: Path) -> None:
    model = sample_models.image_classifier()
    images, labels, _ = sample_models.image_data(np.random.default_rng(0), 13)
    slot = Slot(strategy(3), saved(model, tmp_path, "first"), max_batch_size=32)
    slot.warm_up()
    scored(slot, images, labels)
    traces = slot.traces
    for name in ("second", "third"):
        trained_further(model)
        slot.load(saved(model, tmp_path, name))
        np.testing.assert_allclose(
            slot.forward({"inputs": images})["outputs"], model(images, training=False), rtol=0, atol=1e-5
        )
        expected = sample_models.evaluate_on_one_device(model, [(images, labels)])
        assert scored(slot, images, labels) == pytest.approx(expected, rel=1e-6)
    assert slot.traces == traces


def test_no_variable_is_folded_into_a_constant(make_slot: Callable[..., Slot]) -> None:
    model = sample_models.image_classifier()
    for replicas in (1, 3):
        slot = make_slot(model, replicas=replicas)
        slot.warm_up()
        (function,) = slot._pass.functions
        used = [variable for variable in model.variables if "seed" not in variable.path]
        assert len(function.captured_inputs) == replicas * len(used)
        assert all(tensor.dtype == tf.resource for tensor in function.captured_inputs)
        graph = function.graph.as_graph_def()
        nodes = [*graph.node, *(node for body in graph.library.function for node in body.node_def)]
        constants = [tf.make_ndarray(node.attr["value"].tensor) for node in nodes if node.op == "Const"]
        assert max(constant.size for constant in constants) <= min(8, *(int(np.prod(v.shape)) for v in used))


def test_whoever_asks_is_told_of_every_trace(strategy: Callable[[int], Any], tmp_path: Path) -> None:
    told: list[None] = []
    model = sample_models.image_classifier()
    images, labels, _ = sample_models.image_data(np.random.default_rng(0), 33)
    path = saved(model, tmp_path)
    slot = Slot(strategy(2), path, max_batch_size=16, on_trace=lambda: told.append(None))
    slot.warm_up()
    assert len(told) == 1
    for rows in (1, 2, 3, 15, 16, 17, 33):
        slot.forward({"inputs": images[:rows]})
    assert len(told) == 1
    scored(slot, images, labels)
    slot.load(path)
    scored(slot, images[:5], labels[:5])
    assert len(told) == slot.traces == 2


def test_a_slot_holds_no_optimizer_variables(make_slot: Callable[..., Slot]) -> None:
    model = sample_models.regression()
    model.optimizer.build(model.trainable_variables)
    kept = make_slot(model, replicas=2)._model.variables
    assert len(kept) == len(model.variables) < len(model.variables) + len(model.optimizer.variables)


def test_another_architecture_is_refused(strategy: Callable[[int], Any], tmp_path: Path) -> None:
    slot = Slot(strategy(1), saved(sample_models.regression(), tmp_path, "first"), max_batch_size=8)
    with pytest.raises(ArchitectureMismatchError, match="a slot of its own"):
        slot.load(saved(sample_models.adds_loss(), tmp_path, "second"))


def test_the_optimizer_is_no_part_of_the_architecture(tmp_path: Path) -> None:
    model = sample_models.image_classifier()
    first = read_archive(saved(model, tmp_path, "first")).fingerprint
    model.optimizer.learning_rate = 1e-5
    assert read_archive(saved(model, tmp_path, "second")).fingerprint == first
    model.compile("adam", "sparse_categorical_crossentropy")
    assert read_archive(saved(model, tmp_path, "third")).fingerprint != first


@pytest.mark.parametrize("damage", ["truncated", "no archive", "missing"])
def test_a_damaged_file_is_a_load_error(damage: str, strategy: Callable[[int], Any], tmp_path: Path) -> None:
    path = saved(sample_models.regression(), tmp_path)
    content = path.read_bytes()
    match damage:
        case "truncated":
            path.write_bytes(content[: len(content) // 2])
        case "no archive":
            path.write_bytes(b"not a zip file")
        case _:
            path.unlink()
    with pytest.raises(LoadError, match=r"model\.keras"):
        Slot(strategy(1), path, max_batch_size=8)


def test_damaged_weights_are_a_load_error(strategy: Callable[[int], Any], tmp_path: Path) -> None:
    path = saved(sample_models.regression(), tmp_path)
    slot = Slot(strategy(1), path, max_batch_size=8)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    members["model.weights.h5"] = members["model.weights.h5"][:200]
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    with pytest.raises(LoadError, match=r"the weights of .* cannot be assigned"):
        slot.load(path)


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_weights_are_read_from_archives_of_either_kind(
    compression: int, strategy: Callable[[int], Any], tmp_path: Path
) -> None:
    model = sample_models.regression()
    path = saved(model, tmp_path)
    slot = Slot(strategy(1), path, max_batch_size=8)
    packed = saved(trained_further(model), tmp_path, "packed")
    with zipfile.ZipFile(packed) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(packed, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    slot.load(packed)
    x = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    np.testing.assert_allclose(slot.forward({"x": x})["outputs"], model(x, training=False), rtol=0, atol=1e-6)


def test_only_what_is_new_is_warmed_up(strategy: Callable[[int], Any], tmp_path: Path) -> None:
    path = saved(sample_models.regression(), tmp_path)
    slot = Slot(strategy(2), path, max_batch_size=8)
    rows: list[int] = []
    run = slot._outputs

    def counted(inputs: Arrays) -> Any:
        rows.append(len(inputs["x"]))
        return run(inputs)

    slot._outputs = counted  # type: ignore[method-assign]
    slot._probe._run = counted
    slot.warm_up()
    assert rows == [1, 2, 3, 16]
    slot.load(path)
    slot.warm_up()
    assert rows[4:] == [1]


def test_statistics_that_were_turned_into_constants_are_taken_up(
    strategy: Callable[[int], Any], tmp_path: Path
) -> None:
    normalization = layers.Normalization()
    inputs = keras.Input((2,))
    model = keras.Model(inputs, normalization(inputs))
    values = np.array([[1.0, 2.0], [3.0, 8.0]], np.float32)
    normalization.adapt(values)
    slot = Slot(strategy(2), saved(model, tmp_path, "first"), max_batch_size=8)
    normalization.adapt(values * 10)
    slot.load(saved(model, tmp_path, "second"))
    np.testing.assert_allclose(slot.forward({"inputs": values})["outputs"], model(values), rtol=1e-6)


def test_dropout_that_is_off_at_inference_draws_nothing(make_slot: Callable[..., Slot]) -> None:
    inputs = keras.Input((5, 3), name="x")
    recurrent = layers.LSTM(2, dropout=0.3, recurrent_dropout=0.3)(inputs)
    slot = make_slot(keras.Model(inputs, layers.Dropout(0.5)(recurrent)), replicas=2)
    assert slot.notes == ()


def test_random_numbers_at_inference_are_noted(make_slot: Callable[..., Slot]) -> None:
    inputs = keras.Input((4,))
    model = keras.Model(inputs, sample_models.Noise()(inputs))
    model.compile("sgd", "mse")
    slot = make_slot(model, replicas=2)
    assert [note for note in slot.notes if "random" in note] == list(slot.notes)
    rows = {"inputs": np.zeros((4, 4), np.float32)}
    assert not np.array_equal(slot.forward(rows)["outputs"], slot.forward(rows)["outputs"])


def residual_network() -> Any:
    """Return a network of the layers and the bottleneck blocks of ResNet50, one for each width."""
    images = keras.Input((32, 32, 3), name="images")
    hidden = layers.Conv2D(8, 7, strides=2, padding="same")(images)
    hidden = layers.MaxPooling2D(3, strides=2)(layers.ReLU()(layers.BatchNormalization()(hidden)))
    for width in (8, 16):
        block = hidden
        for filters, size in ((width, 1), (width, 3), (4 * width, 1)):
            block = layers.BatchNormalization()(layers.Conv2D(filters, size, padding="same")(block))
            block = layers.ReLU()(block) if filters == width else block
        shortcut = layers.BatchNormalization()(layers.Conv2D(4 * width, 1)(hidden))
        hidden = layers.ReLU()(layers.Add()([shortcut, block]))
    outputs = layers.Dense(10, activation="softmax", name="predictions")(layers.GlobalAveragePooling2D()(hidden))
    return keras.Model(images, outputs)


def test_a_residual_network_is_loaded_swapped_run_and_scored(strategy: Callable[[int], Any], tmp_path: Path) -> None:
    model = residual_network()
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    slot = Slot(strategy(2), saved(model, tmp_path, "first"), max_batch_size=8)
    model.layers[-1].kernel.assign(model.layers[-1].kernel * 2.0)
    slot.load(saved(model, tmp_path, "second"))
    rng = np.random.default_rng(0)
    images, labels = rng.normal(size=(5, 32, 32, 3)).astype(np.float32), rng.integers(0, 10, 5)
    outputs = slot.forward({slot.signature.inputs[0].name: images})["predictions"]
    np.testing.assert_allclose(outputs, model(images, training=False), rtol=0, atol=1e-5)
    expected = sample_models.evaluate_on_one_device(model, [(images, labels)])
    assert scored(slot, images, labels) == pytest.approx(expected, rel=1e-5)
    assert not slot.notes


def test_text_of_any_length_is_scored(strategy: Callable[[int], Any], tmp_path: Path) -> None:
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    embedded = layers.Embedding(50, 8, mask_zero=True)(tokens)
    model = keras.Model(tokens, layers.Dense(1, activation="sigmoid")(layers.GlobalAveragePooling1D()(embedded)))
    model.compile("adam", "binary_crossentropy", metrics=["accuracy", "AUC"])
    slot = Slot(strategy(3), saved(model, tmp_path, "first"), max_batch_size=8)
    slot.load(saved(trained_further(model), tmp_path, "second"))
    rng = np.random.default_rng(0)
    batches = [
        (rng.integers(1, 50, (rows, length)).astype(np.int32), rng.integers(0, 2, (rows, 1)).astype(np.float32))
        for rows, length in ((7, 4), (1, 9), (20, 30))
    ]
    scorer = slot.scorer()
    state = scorer.start()
    for text, labels in batches:
        state = scorer.update(state, Batch(inputs={"tokens": text}, targets={"targets": labels}))
    assert scorer.result(state) == pytest.approx(sample_models.evaluate_on_one_device(model, batches), rel=1e-6)
    assert slot.traces == 2


def test_strings_go_through_a_vocabulary(strategy: Callable[[int], Any], tmp_path: Path) -> None:
    vectorize = layers.TextVectorization(max_tokens=20, output_sequence_length=4)
    vectorize.adapt(["the lead and the understudy", "the stage"])
    text = keras.Input((), dtype="string", name="text")
    embedded = layers.GlobalAveragePooling1D()(layers.Embedding(20, 3)(vectorize(text)))
    model = keras.Model(text, layers.Dense(2)(embedded))
    model.compile("sgd", "mse")
    slot = Slot(strategy(2), saved(model, tmp_path, "first"), max_batch_size=8)
    slot.load(saved(trained_further(model), tmp_path, "second"))
    lines = np.array([b"the stage", b"an unknown word", b"lead"], dtype=object)
    assert slot.check_inputs({"text": lines}) == 3
    expected = model(tf.constant(lines.tolist())).numpy()
    np.testing.assert_allclose(slot.forward({"text": lines})["outputs"], expected, rtol=0, atol=1e-6)
    unicode_lines = np.array(["the stage", "an unknown word", "lead"])
    np.testing.assert_allclose(slot.forward({"text": unicode_lines})["outputs"], expected, rtol=0, atol=1e-6)
    targets = np.zeros((3, 2), np.float32)
    assert scored(slot, lines, targets)["loss"] == pytest.approx(float(np.mean(expected**2)), rel=1e-6)
    vectorize.adapt(["another vocabulary"])
    with pytest.raises(ArchitectureMismatchError):
        slot.load(saved(model, tmp_path, "third"))


def test_a_discarded_slot_is_forgotten(strategy: Callable[[int], Any], tmp_path: Path) -> None:
    model = sample_models.image_classifier()
    images, labels, _ = sample_models.image_data(np.random.default_rng(0), 4)
    slot = Slot(strategy(2), saved(model, tmp_path), max_batch_size=8)
    scored(slot, images, labels)
    graph, weights = weakref.ref(slot._pass.functions[0].graph), weakref.ref(slot._model.weights[0])
    del slot
    gc.collect()
    assert graph() is None
    assert weights() is None


def test_a_ragged_input_is_answered_as_keras_answers_it_and_a_note_says_what_padding_does(
    make_slot: Callable[..., Slot],
) -> None:
    ids = keras.Input((None,), dtype="int64", ragged=True, name="ids")
    mean = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(10, 4)(ids))
    model = keras.Model(ids, keras.layers.Dense(3)(mean))
    slot = make_slot(model, replicas=2)

    expected = model.predict(tf.ragged.constant([[1, 2], [3, 4], [5, 6, 7]], dtype=tf.int64), verbose=0)
    (pair,) = slot.forward({"ids": np.array([[1, 2], [3, 4]])}).values()
    (longer,) = slot.forward({"ids": np.array([[5, 6, 7]])}).values()
    np.testing.assert_allclose(np.concatenate([pair, longer]), expected, rtol=1e-6)
    (note,) = slot.notes
    assert note.startswith("the input 'ids' is ragged, so padding counts as values")
