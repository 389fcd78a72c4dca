"""One canary for each private name of Keras and TensorFlow: a failing test names what a new version broke."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from testkit.preloading import preloaded
from understudy import compat

ROOT = Path(__file__).parent.parent.parent
FOLDERS = ("checkpoints", "experiments", "trainer", "evaluator", "cli")
"""Not the service, whose messages for TensorFlow Serving's protocol are in `tensorflow.core`."""

PRIVATE_PACKAGES = ("keras.src", "tensorflow.python", "tensorflow.core", "tensorflow.compiler")
START_SECONDS = 250


def two_outputs() -> keras.Model:
    inputs = keras.Input([3], name="values")
    model = keras.Model(inputs, {"a": layers.Dense(1, name="first")(inputs), "b": layers.Dense(1)(inputs)})
    model.compile("sgd", loss={"a": "mse", "b": "mae"}, metrics={"a": ["mae"]}, loss_weights={"a": 1.0, "b": 2.0})
    return model


class SimpleFunction:
    """What the runtime asks of a function that it is given as an attribute."""

    def __init__(self, definition: Any) -> None:
        self.name = definition.signature.name

    def add_to_graph(self, graph: Any) -> None:
        """Be in no graph."""


def values(*shape: int) -> Any:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def test_functional_graph_keeps_the_structure_of_inputs() -> None:
    functional = two_outputs()
    sequential = keras.Sequential([keras.Input([3]), layers.Dense(1)])

    class Subclassed(keras.Model):  # type: ignore[misc]
        pass

    graph = compat.functional_graph(sequential)
    assert compat.functional_graph(functional) is functional
    assert graph is not None
    assert graph.input.shape == (None, 3)
    assert compat.functional_graph(Subclassed()) is None


def test_operation_of_is_the_layer_that_computes_a_tensor() -> None:
    assert compat.operation_of(two_outputs().output["a"]).name == "first"


def test_layers_of_has_the_layers_within_layers() -> None:
    model = keras.Sequential([keras.Input([4, 3]), layers.Bidirectional(layers.GRU(2, name="within"))])

    assert any("within" in layer.name for layer in compat.layers_of(model))


def test_masks_are_those_that_layers_set_and_losses_use() -> None:
    masked = layers.Masking()(tf.constant([[[1.0], [0.0]]]))
    predicted = tf.constant([[[1.0], [5.0]]])
    compat.put_mask(predicted, tf.constant([[True, False]]))

    assert compat.mask_of(masked).numpy().tolist() == [[True, False]]
    assert compat.mask_of(tf.constant(1.0)) is None
    assert float(keras.losses.MeanSquaredError()(tf.constant([[[3.0], [0.0]]]), predicted)) == pytest.approx(4.0)


def test_loss_for_makes_a_loss_of_a_name() -> None:
    loss = compat.loss_for("mse", tf.zeros([2, 1]), tf.ones([2, 1]))
    loss.reduction = "none"

    assert loss(tf.zeros([2, 1]), tf.constant([[1.0], [2.0]])).numpy().tolist() == [1.0, 4.0]


def test_compiled_loss_adds_up_the_outputs_with_their_weights() -> None:
    model = two_outputs()
    y, predicted = {name: values(4, 1) for name in "ab"}, {name: np.zeros([4, 1], np.float32) for name in "ab"}
    compat.build_for(model, (tf.TensorSpec([None, 3]), {name: tf.TensorSpec([None, 1]) for name in "ab"}))

    expected = np.mean(y["a"] ** 2) + 2.0 * np.mean(np.abs(y["b"]))
    assert float(compat.compiled_loss(model)(y, predicted, None)) == pytest.approx(expected, rel=1e-5)


def test_build_for_creates_the_variables_of_metrics_and_compiled_metrics_are_one() -> None:
    model = two_outputs()

    compat.build_for(model, (tf.TensorSpec([None, 3]), {name: tf.TensorSpec([None, 1]) for name in "ab"}))

    metrics = compat.compiled_metrics(model)
    assert metrics is not None
    assert metrics.variables
    y = {name: values(4, 1) for name in "ab"}
    state = metrics.stateless_update_state(metrics.variables, y, {name: np.zeros([4, 1], np.float32) for name in "ab"})
    assert float(metrics.stateless_result(state)["a_mae"]) == pytest.approx(np.mean(np.abs(y["a"])), rel=1e-5)


def test_metrics_with_values_pairs_each_metric_with_its_output() -> None:
    model = two_outputs()
    model.compile("sgd", metrics={"a": ["mae"], "b": ["mse"]}, weighted_metrics={"b": ["mae"]})
    y, predicted = {name: values(4, 1) for name in "ab"}, {name: values(4, 2) for name in "ab"}
    assert list(compat.metrics_with_values(compat.compiled_metrics(model), y, predicted)) == []
    compat.build_for(model, (tf.TensorSpec([None, 3]), {name: tf.TensorSpec([None, 1]) for name in "ab"}))

    found = list(compat.metrics_with_values(compat.compiled_metrics(model), y, predicted))
    assert [(metric.name, output) for metric, output, *_ in found] == [("mae", "a"), ("mse", "b"), ("mae", "b")]
    assert all(target is y[output] and guess is predicted[output] for _, output, target, guess in found)


def test_a_model_that_was_taken_apart_needs_nothing_of_an_optimizer_in_a_checkpoint(tmp_path: Path) -> None:
    published, compiled = keras.Sequential([keras.Input([3]), layers.Dense(2)]), keras.Sequential()
    compiled.add(keras.Input([3]))
    compiled.add(layers.Dense(2))
    compiled.compile("sgd", "mse")
    path = tf.train.Checkpoint(published).write(str(tmp_path / "ckpt"))
    with pytest.raises(AssertionError):
        tf.train.Checkpoint(compiled).read(path).expect_partial().assert_existing_objects_matched()

    compat.uncompile(compiled)

    tf.train.Checkpoint(compiled).read(path).expect_partial().assert_existing_objects_matched()
    np.testing.assert_array_equal(published.get_weights()[0], compiled.get_weights()[0])


def test_without_automatic_xla_a_compiled_model_does_not_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = keras.src.trainers.trainer.Trainer
    monkeypatch.setattr(trainer, "_resolve_auto_jit_compile", lambda _: True)
    with_it, without = two_outputs(), two_outputs()

    with_it.compile("sgd", "mse", jit_compile="auto")
    with compat.without_automatic_xla():
        without.compile("sgd", "mse", jit_compile="auto")

    assert with_it.jit_compile is True
    assert without.jit_compile is False


@pytest.mark.parametrize(
    ("build", "shape"),
    [(lambda: layers.Dense(2), (3,)), (lambda: layers.LSTM(2), (5, 3))],
    ids=["layer", "masked layer"],
)
def test_a_layer_is_called_for_every_time_step_where_their_number_is_open(
    build: Callable[[], Any], shape: tuple[int, ...]
) -> None:
    compat.repair_open_axes()
    inner = build()
    inputs = keras.Input((None, *shape))
    masked = layers.Masking()(inputs)
    model = keras.Model(inputs, layers.TimeDistributed(inner)(masked))
    function = tf.function(model, input_signature=[tf.TensorSpec(inputs.shape)])
    for examples, steps in ((1, 2), (4, 3), (2, 2)):
        batch = values(examples, steps, *shape)
        batch[:, -1:] = 0
        expected = np.stack([inner(masked_step) for masked_step in _steps(batch)], axis=1)
        np.testing.assert_allclose(function(batch), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_images_of_open_size_are_enlarged_as_those_of_known_size(interpolation: str, data_format: str) -> None:
    compat.repair_open_axes()
    layer = layers.UpSampling2D((2, 3), data_format=data_format, interpolation=interpolation)
    shape = (None, None, None, 3) if data_format == "channels_last" else (None, 3, None, None)
    function = tf.function(layer, input_signature=[tf.TensorSpec(shape)])
    for height, width in ((4, 5), (6, 4)):
        images = values(2, height, width, 3)
        images = images if data_format == "channels_last" else images.transpose(0, 3, 1, 2)
        np.testing.assert_array_equal(function(images), layer(images))


def _steps(batch: Any) -> Iterator[Any]:
    for step in range(batch.shape[1]):
        yield layers.Masking()(batch[:, step])


def test_gradients_that_are_left_as_they_are_are_added_up_only_once(logical_cpus: tuple[str, ...]) -> None:
    strategy = tf.distribute.MirroredStrategy(list(logical_cpus[:2]))
    with strategy.scope():
        variable = keras.Variable([0.0])
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([variable])
    compat.leave_gradients_as_they_are(optimizer)

    strategy.run(tf.function(lambda: optimizer.apply([tf.constant([1.0])], [variable])))

    assert float(np.asarray(variable)[0]) == -1.0


def test_call_flat_runs_a_function_on_flat_tensors() -> None:
    variable = tf.Variable(2.0)
    function = tf.function(lambda x: [x * variable]).get_concrete_function(tf.TensorSpec([None]))

    (doubled,) = compat.call_flat(function)(tf.constant([1.0, 2.0]), *function.captured_inputs)

    assert doubled.numpy().tolist() == [2.0, 4.0]


def test_functions_run_again_after_their_kernels_are_cleared() -> None:
    function = tf.function(lambda x: x + 1.0).get_concrete_function(tf.TensorSpec([]))
    function(tf.constant(1.0))

    compat.clear_kernels()

    assert float(function(tf.constant(1.0))) == 2.0


def test_constants_take_the_place_of_variables_also_in_loops() -> None:
    weight = tf.Variable(2.0)

    def thrice(x: Any) -> list[Any]:
        return list(tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, y * weight), [tf.constant(0), x]))

    function = tf.function(thrice, autograph=False).get_concrete_function(tf.TensorSpec([None]))

    graph, converted = compat.constants_for_variables(function, [weight])

    assert len(converted) == len(function.captured_inputs) == 1
    assert not any("VariableOp" in node.op for node in graph.node)
    assert any(node.op == "While" for node in graph.node)
    assert len(graph.library.function) == 2


def test_a_function_can_be_called_from_when_it_is_added_until_it_is_removed() -> None:
    original = tf.function(lambda x: x + 1.0).get_concrete_function(tf.TensorSpec([]))
    definition = original.function_def
    copied = type(definition)()
    copied.CopyFrom(definition)
    copied.signature.name = "added_by_this_test"

    def call() -> Any:
        return tf.raw_ops.PartitionedCall(args=[tf.constant(1.0)], Tout=[tf.float32], f=SimpleFunction(copied))

    compat.add_function(copied)
    assert float(call()[0]) == 2.0
    compat.remove_function("added_by_this_test")
    compat.clear_kernels()
    with pytest.raises(tf.errors.OpError):
        call()


def test_a_saved_model_is_parsed_with_its_signatures_and_its_fingerprint(tmp_path: Path) -> None:
    module = tf.Module()
    module.f = tf.function(lambda x: {"y": x}, input_signature=[tf.TensorSpec([None], name="x")])
    tf.saved_model.save(module, str(tmp_path), signatures={"serving_default": module.f})

    graph = compat.parse_saved_model((tmp_path / "saved_model.pb").read_bytes()).meta_graphs[0]
    fingerprint = compat.parse_fingerprint((tmp_path / "fingerprint.pb").read_bytes())

    assert "x" in graph.signature_def["serving_default"].inputs
    assert fingerprint.checkpoint_hash != 0


def test_an_object_graph_names_the_objects_of_a_checkpoint(tmp_path: Path) -> None:
    path = tf.train.Checkpoint(model=tf.Module(), step=tf.Variable(1)).write(str(tmp_path / "ckpt"))

    content = tf.train.load_checkpoint(path).get_tensor("_CHECKPOINTABLE_OBJECT_GRAPH")

    assert "step" in {child.local_name for child in compat.parse_object_graph(content).nodes[0].children}


def test_a_model_of_its_configuration_is_what_load_model_builds_but_for_the_weights(tmp_path: Path) -> None:
    model = two_outputs()
    model.save(tmp_path / "model.keras")

    built = compat.model_of_config(keras.saving.serialize_keras_object(model), safe_mode=True)

    assert not built.compiled
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert [weight.path for weight in built.weights] == [weight.path for weight in loaded.weights]
    with pytest.raises(ValueError, match="disallowed by default"):
        compat.model_of_config(
            keras.saving.serialize_keras_object(keras.Sequential([keras.Input([3]), layers.Lambda(lambda x: x)])),
            safe_mode=True,
        )


def test_weights_are_read_through_a_store_of_ones_own(tmp_path: Path) -> None:
    model, other = (keras.Sequential([keras.Input([3]), layers.Dense(2)]) for _ in range(2))
    model.save_weights(tmp_path / "model.weights.h5")
    read: list[str] = []

    class Store(compat.h5_store()):  # type: ignore[misc]
        def __getitem__(self, key: str) -> Any:
            read.append(str(compat.h5_dataset(self._h5_entry_group, key).name))
            return super().__getitem__(key)

        def _get_h5_file(self, path_or_io: object, mode: str | None = None) -> h5py.File:
            del path_or_io, mode
            return h5py.File(tmp_path / "model.weights.h5", "r")

    store = Store("unused.weights.h5", mode="r")
    failures = compat.load_state(other, store)
    store.close()

    assert not failures
    assert len(read) == 2
    np.testing.assert_array_equal(model.get_weights()[0], other.get_weights()[0])


def test_weights_that_do_not_fit_are_reported_with_their_layer(tmp_path: Path) -> None:
    narrow, wide = (keras.Sequential([keras.Input([3]), layers.Dense(size)]) for size in (2, 4))
    narrow.save_weights(tmp_path / "model.weights.h5")
    store = compat.h5_store()(str(tmp_path / "model.weights.h5"), mode="r")

    failures = compat.load_state(wide, store)
    store.close()

    assert [layer for layer, _ in failures.values()] == [wide.layers[0]]


def test_a_plain_variable_is_on_the_current_device_also_in_a_strategys_scope() -> None:
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        assert hasattr(tf.Variable(1.0), "values")
        variable = compat.plain_variable(tf.constant([1.0, 2.0]))

    assert not hasattr(variable, "values")
    assert variable.read_value().numpy().tolist() == [1.0, 2.0]


REGISTRATION = """
from tensorflow.python.eager import context
from understudy.compat import bound_cluster_registration

bound_cluster_registration({"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"]}, 7.0)
settings = context.context().coordination_service
print(settings.service_leader, settings.cluster_register_timeout_in_ms, settings.cluster_register_with_barrier)
"""

WORKERS = """
import os
import socket

import tensorflow as tf

from understudy.compat import worker_count

sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
first, second, third = (f"127.0.0.1:{s.getsockname()[1]}" for s in sockets)
for s in sockets:
    s.close()
cluster = tf.train.ClusterSpec({"worker": [first, second], "ps": [third]})
tasks = [("worker", 0), ("worker", 1), ("ps", 0)]
servers = [tf.distribute.Server(cluster, job_name=job, task_index=index) for job, index in tasks]
resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, rpc_layer="grpc")
print(worker_count(tf.distribute.ParameterServerStrategy(resolver)), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        pytest.param(REGISTRATION, "/job:chief/replica:0/task:0 7000 True", id="bound_cluster_registration"),
        pytest.param(WORKERS, "2", id="worker_count"),
    ],
)
def test_the_settings_of_a_cluster_are(program: str, expected: str) -> None:
    """In a process of its own, because a cluster changes the devices of a process."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **preloaded()},
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == expected


NEEDED: list[tuple[str, Callable[[], object]]] = [
    ("_flatten_layers", lambda: compat.layers_of(SimpleNamespace())),
    ("_all_reduce_sum_gradients", lambda: compat.leave_gradients_as_they_are(SimpleNamespace())),
    ("_compile_metrics", lambda: compat.compiled_metrics(SimpleNamespace())),
]


@pytest.mark.parametrize(("name", "use"), NEEDED, ids=[name for name, _ in NEEDED])
def test_a_name_that_is_gone_is_named_with_the_versions_that_have_it(name: str, use: Callable[[], object]) -> None:
    with pytest.raises(compat.PrivateNameError, match=rf"{name} is not in keras \S+, tensorflow \S+; .*install keras"):
        use()


def private_names(file: Path) -> Iterator[str]:
    """Yield the private packages that a file imports."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        modules += [ast.unparse(node)] if isinstance(node, ast.Attribute) else []
        yield from (module for module in modules if module.startswith(PRIVATE_PACKAGES))


def test_parse_bundle_entry_has_the_type_the_shape_and_the_size() -> None:
    entry = compat.parse_bundle_entry(b"\x08\x01\x12\x04\x12\x02\x08\x03\x28\x0c")

    assert compat.data_type_name(entry.dtype) == "DT_FLOAT"
    assert ([dimension.size for dimension in entry.shape.dim], entry.size) == ([3], 12)


def test_unpack_asset_has_the_file_name() -> None:
    class Packed:
        """As in the collections of a graph."""

        def Unpack(self, message: Any) -> bool:  # noqa: N802 - protobuf's name
            """Fill the message."""
            message.filename = "words.txt"
            return True

    asset = compat.unpack_asset(Packed())

    assert asset is not None
    assert asset.filename == "words.txt"


def test_is_stateful_tells_operations_apart() -> None:
    assert [compat.is_stateful(name) for name in ("WriteFile", "MatMul", "Unknown")] == [True, False, None]


def test_exported_by_keras_knows_public_names_only() -> None:
    assert compat.exported_by_keras("keras.layers.Dense") is layers.Dense
    assert compat.exported_by_keras("keras.layers.Unknown") is None


def test_is_saveable_knows_layers_and_operations() -> None:
    operation = type(keras.Model(inputs := keras.Input([3]), keras.ops.abs(inputs)).operations[1])

    assert compat.is_saveable(layers.Dense)
    assert compat.is_saveable(operation)
    assert not compat.is_saveable(dict)


def test_named_by_older_configurations_are_layers_and_models() -> None:
    assert {"Dense", "InputLayer", "Functional", "Sequential"} <= compat.named_by_older_configurations().keys()


@functools.cache
def names_of_compat() -> frozenset[str]:
    """Return the private attributes that `understudy.compat` uses."""
    tree = ast.parse(Path(compat.__file__).read_text(encoding="utf-8"))
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return frozenset(text for text in texts if re.fullmatch(r"_[a-z]\w*", text))


def test_no_other_module_uses_a_private_name() -> None:
    files = [
        file
        for folder in FOLDERS
        for file in (ROOT / folder / "understudy").rglob("*.py")
        if "compat" not in file.parts
    ]
    imported = [f"{file.relative_to(ROOT)}: {name}" for file in files for name in private_names(file)]
    used = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in files
        for name in names_of_compat()
        if re.search(rf"""[."']{name}\b""", file.read_text(encoding="utf-8"))
    ]

    assert len(names_of_compat()) >= 9
    assert not imported
    assert not used
