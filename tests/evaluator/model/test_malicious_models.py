"""Checkpoints that would harm the process that loads them are refused before Keras or TensorFlow reads them."""

from __future__ import annotations

import contextlib
import json
import resource
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

from soak.malicious import HARMS, Harm, honest_model, model_with_asset, rewrite_config
from testkit.more_sample_models import KINDS
from understudy.checkpoints.kinds import ModelKind
from understudy.evaluator.evaluator_errors import LoadError
from understudy.evaluator.model.loaders import loader_for

GIBIBYTE = 2**30


@keras.saving.register_keras_serializable(package="tests")
class Registered(keras.layers.Layer):  # type: ignore[misc]
    """A layer of the experiment's own."""

    def call(self, x: Any) -> Any:
        """Return twice the input."""
        return 2 * x


@pytest.fixture
def unchanged() -> Iterator[None]:
    """Keras's settings are those of before."""
    epsilon = keras.config.epsilon()
    yield
    found = keras.config.epsilon()
    keras.config.set_epsilon(epsilon)
    assert found == epsilon
    assert keras.src.saving.serialization_lib.in_safe_mode() is None


def load(kind: ModelKind, folder: Path, **options: Any) -> Any:
    loader = loader_for(kind, honest_model, **options)
    file = folder / kind.file_name
    loader.architecture_of(file)
    return loader.build(file)


@pytest.mark.parametrize("name", HARMS)
@pytest.mark.usefixtures("unchanged")
def test_it_is_refused_for_what_it_is_and_leaves_no_trace(name: str, tmp_path: Path) -> None:
    harm, marker, folder = HARMS[name], tmp_path / "marker", tmp_path / "model"
    folder.mkdir()
    harm.write(folder, marker)
    files = sorted(folder.rglob("*"))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    with pytest.raises(LoadError, match=harm.refusal):
        load(harm.kind, folder)

    assert not marker.exists()
    assert sorted(folder.rglob("*")) == files
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < GIBIBYTE // 1024


def claim_keras_2(kind: ModelKind, file: Path) -> None:
    """Have a file say that Keras 2 wrote it, so that its configuration is translated."""
    if kind is ModelKind.HDF5:
        with h5py.File(file, "r+") as opened:
            opened.attrs["keras_version"] = "2.15.0"
    else:
        with zipfile.ZipFile(file) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        members["metadata.json"] = json.dumps({"keras_version": "2.15.0"}).encode()
        with zipfile.ZipFile(file, "w") as archive:
            for name, content in members.items():
                archive.writestr(name, content)


@pytest.mark.parametrize(
    "name",
    [name for name, harm in HARMS.items() if harm.kind in (ModelKind.KERAS, ModelKind.HDF5) and "MiB" not in name],
)
@pytest.mark.usefixtures("unchanged")
def test_it_does_no_harm_as_a_file_of_keras_2(name: str, tmp_path: Path) -> None:
    harm, marker = HARMS[name], tmp_path / "marker"
    harm.write(tmp_path, marker)
    with contextlib.suppress(OSError, RuntimeError, UnicodeError, zipfile.BadZipFile):  # damaged on purpose
        claim_keras_2(harm.kind, tmp_path / harm.kind.file_name)

    with contextlib.suppress(LoadError):
        load(harm.kind, tmp_path)

    assert not marker.exists()


def test_a_refusal_names_the_flag(tmp_path: Path) -> None:
    HARMS["set_epsilon as an activation"].write(tmp_path, tmp_path / "marker")

    with pytest.raises(LoadError, match=r"keras\.config\.set_epsilon.*--allow-unsafe-models"):
        load(ModelKind.KERAS, tmp_path)


def own_loss(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.mean(keras.ops.abs(y_true - y_pred), axis=-1)


def test_a_loss_that_is_not_registered_is_refused_with_the_line_to_add_which_also_helps_old_checkpoints(
    tmp_path: Path,
) -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", own_loss)
    model.save(tmp_path / "model.keras")
    with pytest.raises(
        LoadError, match=r"names 'own_loss', .*register_keras_serializable\(\) before it .*--experiment"
    ):
        load(ModelKind.KERAS, tmp_path)
    try:
        keras.saving.register_keras_serializable()(own_loss)
        config = load(ModelKind.KERAS, tmp_path).compile_config
        assert keras.saving.deserialize_keras_object(config)["loss"] is own_loss
    finally:
        keras.saving.get_custom_objects().pop("Custom>own_loss")


def test_the_corpus_is_no_sham_keras_calls_the_function_where_it_is_allowed(tmp_path: Path) -> None:
    HARMS["set_epsilon as an activation"].write(tmp_path, tmp_path / "marker")
    epsilon = keras.config.epsilon()
    try:
        model = load(ModelKind.KERAS, tmp_path, allow_unsafe_models=True).model
        with contextlib.suppress(ValueError, TypeError):  # the function returns no tensor
            model(np.ones((1, 3)))
        assert keras.config.epsilon() is not epsilon
    finally:
        keras.config.set_epsilon(epsilon)


def test_the_corpus_is_no_sham_a_saved_model_writes_the_file_where_it_is_allowed(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    HARMS["a SavedModel that writes a file"].write(tmp_path, marker)

    built = load(ModelKind.SAVED_MODEL, tmp_path, allow_unsafe_models=True)
    built.model({"x": np.ones((1, 3), np.float32)})

    assert marker.read_text() == "written"


@pytest.mark.parametrize("name", ["a Lambda layer", "a Lambda layer in .h5 (CVE-2025-9905)"])
def test_the_corpus_is_no_sham_a_lambda_writes_the_file_where_it_is_allowed(name: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    HARMS[name].write(tmp_path, marker)

    with contextlib.suppress(LoadError):  # the harm is done before the weights of the Dense layer find no place
        load(HARMS[name].kind, tmp_path, allow_unsafe_models=True)

    assert marker.exists()


def test_unsafe_models_must_keep_to_the_sizes_all_the_same(tmp_path: Path) -> None:
    HARMS["an archive that expands to 300 MiB"].write(tmp_path, tmp_path / "marker")

    with pytest.raises(LoadError, match="would expand"):
        load(ModelKind.KERAS, tmp_path, allow_unsafe_models=True)


def test_what_the_experiment_registered_is_accepted(tmp_path: Path) -> None:
    inputs = keras.Input((3,), name="x")
    keras.Model(inputs, Registered(name="y")(inputs)).save(tmp_path / "model.keras")

    np.testing.assert_array_equal(load(ModelKind.KERAS, tmp_path).model(np.ones((1, 3))), 2 * np.ones((1, 3)))


def test_a_file_is_checked_again_when_it_changes(tmp_path: Path) -> None:
    honest_model().save(tmp_path / "model.keras")
    loader = loader_for(ModelKind.KERAS, None)
    loader.build(tmp_path / "model.keras")

    def spoil(config: dict[str, Any]) -> None:
        config["config"]["layers"][1]["class_name"] = "Lambda"

    rewrite_config(tmp_path / "model.keras", spoil)

    with pytest.raises(LoadError, match="Lambda"):
        loader.build(tmp_path / "model.keras")


def test_a_saved_model_with_assets_is_accepted_also_saved_again(tmp_path: Path) -> None:
    vocabulary = tmp_path / "words.txt"
    vocabulary.write_text("a\nb\n")
    module = model_with_asset(vocabulary)
    first, again = tmp_path / "first", tmp_path / "again"
    tf.saved_model.save(module, str(first / "saved_model"), signatures={"serving_default": module.serve})
    loaded = tf.saved_model.load(str(first / "saved_model"))
    tf.saved_model.save(loaded, str(again / "saved_model"), signatures=dict(loaded.signatures))

    for folder in (first, again):
        model = load(ModelKind.SAVED_MODEL, folder).model
        assert model({"x": tf.constant(["b", "c"])})["y"].numpy().tolist() == [1, -1]


def test_a_saved_model_of_tensorflow_1_with_assets_is_accepted(tmp_path: Path) -> None:
    vocabulary = tmp_path / "words.txt"
    vocabulary.write_text("a\nb\n")
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x = tf.compat.v1.placeholder(tf.string, [None])
        source = tf.lookup.TextFileInitializer(str(vocabulary), tf.string, -2, tf.int64, -1)
        offset = tf.compat.v1.get_variable("offset", (), tf.int64, initializer=tf.compat.v1.zeros_initializer())
        y = tf.lookup.StaticHashTable(source, -1).lookup(x) + offset
        session.run(tf.compat.v1.global_variables_initializer())
        initializer = tf.compat.v1.tables_initializer()
        tf.compat.v1.saved_model.simple_save(
            session, str(tmp_path / "saved_model"), {"x": x}, {"y": y}, legacy_init_op=initializer
        )

    load(ModelKind.SAVED_MODEL, tmp_path)


@pytest.mark.parametrize("name", KINDS)
def test_each_sample_model_is_accepted(name: str, tmp_path: Path) -> None:
    KINDS[name].build().save(tmp_path / "model.keras")

    assert loader_for(ModelKind.KERAS, None).architecture_of(tmp_path / "model.keras")


@pytest.mark.parametrize("name", ["ConvNeXtTiny", "MobileNetV3Small"])
def test_published_architectures_are_accepted(name: str) -> None:
    from understudy.evaluator.model.allowlists import check_config

    model = getattr(keras.applications, name)(weights=None, include_top=False, input_shape=(32, 32, 3))

    check_config(keras.saving.serialize_keras_object(model), "model.keras")


def honest_objects() -> Iterator[tuple[str, Any]]:
    """Yield each class of Keras that can be made with simple arguments."""
    arguments: list[tuple[Any, ...]] = [
        (),
        (3,),
        (3, 3),
        (3, 3, 3),
        ((3, 3),),
        (0.5,),
        (0.1, 10),
        (0.1, 10, 0.5),
        ([1, 2], [0.1, 0.2, 0.3]),
        ([1, 2],),
        (2, [0]),
        (keras.layers.Dense(2),),
        (keras.layers.LSTM(2),),
        (keras.layers.LSTMCell(2),),
        ([keras.layers.LSTMCell(2)],),
        ((0.1, 0.2), (0.1, 0.2)),
    ]
    packages = (
        keras.constraints,
        keras.initializers,
        keras.layers,
        keras.losses,
        keras.metrics,
        keras.optimizers,
        keras.optimizers.schedules,
        keras.regularizers,
    )
    for package in packages:
        for name, kind in vars(package).items():
            if not isinstance(kind, type):
                continue
            for given in arguments:
                try:
                    made = keras.saving.serialize_keras_object(kind(*given))
                except Exception:  # noqa: BLE001, S112 - these are not its arguments
                    continue
                yield f"{package.__name__}.{name}", made
                break


def test_every_class_of_keras_that_computes_is_accepted() -> None:
    from understudy.evaluator.model.allowlists import check_config

    refused, accepted = set(), set()
    for name, config in honest_objects():
        try:
            check_config(config, "model.keras")
        except LoadError:
            refused.add(name.rpartition(".")[2])
        else:
            accepted.add(name)

    assert refused == {"Lambda"}
    assert len(accepted) > 280


@pytest.mark.parametrize(
    ("module", "registered_name", "told"),
    [
        ("keras_hub.src.models.bert", "keras_hub>Bert", "if it is the package keras_hub that registers it, import ke"),
        ("__main__", "mine>Bert", "if it is your own, put @keras.saving.register_keras_serializable"),
        ("mine", "Bert", "if it is your own, put @keras.saving.register_keras_serializable"),
        ("a b", "mine>Bert", "if it is your own, put @keras.saving.register_keras_serializable"),
    ],
)
def test_a_class_of_a_package_is_refused_with_what_to_import(module: str, registered_name: str, told: str) -> None:
    from understudy.evaluator.model.allowlists import check_config

    config = {"class_name": "Bert", "module": module, "registered_name": registered_name, "config": {}}
    with pytest.raises(LoadError, match=told):
        check_config(config, "model.keras")


def test_operations_on_tensors_are_accepted(tmp_path: Path) -> None:
    inputs = keras.Input((4,), name="x")
    hidden = keras.ops.concatenate([inputs[:, :2] * 2 - 1, keras.ops.relu(inputs), inputs**2], axis=-1)
    keras.Model(inputs, keras.ops.softmax(keras.ops.einsum("ab,ab->ab", hidden, hidden))).save(tmp_path / "model.keras")

    assert load(ModelKind.KERAS, tmp_path).model(np.ones((1, 4))).shape == (1, 10)


def test_each_kind_of_harm_is_in_the_corpus() -> None:
    assert {harm.kind for harm in HARMS.values()} == set(ModelKind)
    assert all(isinstance(harm, Harm) for harm in HARMS.values())
