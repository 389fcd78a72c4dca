"""Weights reach the first replica's device once, in pieces, and the other replicas from there."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import op_callbacks

from understudy.checkpoints import ModelKind
from understudy.devices.selection import canonical
from understudy.evaluator.model import weights
from understudy.evaluator.model.loaders import loader_for
from understudy.evaluator.model.slot import Slot

HOST = "CPU:0"
PIECE_BYTES = 2**12
FEATURES, WIDTH = 301, 70
"""Enough for a kernel of the model to be read straight from the file, and to be copied in pieces."""


@pytest.fixture(scope="module")
def strategy(logical_cpus: tuple[str, ...]) -> Any:
    """Replicas on CPUs that stand for GPUs: the first CPU is the host, and runs none."""
    assert canonical(logical_cpus[0]) == HOST
    return tf.distribute.MirroredStrategy(list(logical_cpus[1:3]))


def build_model() -> Any:
    x = keras.Input((FEATURES,), name="x")
    hidden = keras.layers.Dense(WIDTH, bias_initializer="uniform")(x)
    return keras.Model(x, keras.layers.BatchNormalization()(hidden))


@dataclass
class Copies:
    """The bytes that operations on other devices took from the host, and the devices that assigned values came from.

    TensorFlow keeps integers, which are shapes and seeds here, on the host.
    """

    from_host: list[int] = field(default_factory=list)
    assigned_from: list[str] = field(default_factory=list)

    @contextmanager
    def noted(self) -> Iterator[None]:
        op_callbacks.add_op_callback(self._note)
        try:
            yield
        finally:
            op_callbacks.remove_op_callback(self._note)

    def _note(self, op_type: Any, inputs: Any, _: Any, outputs: Any, *name_and_graph: Any) -> None:
        kind = op_type.decode() if isinstance(op_type, bytes) else op_type
        floats = [tensor for tensor in inputs if tensor.dtype.is_floating]
        if any(graph is not None for graph in name_and_graph[1:]) or not floats:
            return
        if kind.startswith("Assign"):
            self.assigned_from.append(canonical(floats[0].backing_device))
        places = [canonical(tensor.device) for tensor in (*outputs, *inputs) if tensor.dtype in _PLACED]
        if any(place != HOST for place in places):
            self.from_host += [nbytes(tensor) for tensor in floats if canonical(tensor.backing_device) == HOST]


_PLACED = {tf.float32, tf.resource}
"""The dtypes of tensors whose place says where an operation ran."""


def nbytes(tensor: Any) -> int:
    return math.prod(map(int, tensor.shape)) * int(tensor.dtype.size)


def write(kind: ModelKind, model: Any, folder: Path) -> Path:
    folder.mkdir()
    if kind is ModelKind.TF_CHECKPOINT:
        return Path(tf.train.Checkpoint(model=model).write(str(folder / "model")))
    name = {ModelKind.KERAS: "model.keras", ModelKind.WEIGHTS: "model.weights.h5", ModelKind.HDF5: "model.h5"}[kind]
    save = model.save_weights if kind is ModelKind.WEIGHTS else model.save
    save(folder / name)
    return folder / name


@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
@pytest.mark.parametrize("kind", [ModelKind.KERAS, ModelKind.WEIGHTS, ModelKind.HDF5, ModelKind.TF_CHECKPOINT])
def test_weights_reach_the_first_device_once_in_pieces_and_the_others_from_there(
    kind: ModelKind, strategy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "PIECE_BYTES", PIECE_BYTES)
    first, second = strategy.extended.worker_devices
    before, after = build_model(), build_model()
    for model in (before, after):
        model.layers[2].set_weights([np.random.default_rng(3).uniform(0.5, 1.5, WIDTH).astype(np.float32)] * 4)
    loader = loader_for(kind, build_model)
    slot = Slot(strategy, write(kind, before, tmp_path / "1"), max_batch_size=4, loader=loader, per_replica=True)
    copies = Copies()

    with copies.noted():
        slot.load(write(kind, after, tmp_path / "2"))

    written = [variable for variable in after.variables if variable.dtype == "float32"]
    assert sum(copies.from_host) == sum(nbytes(variable) for variable in map(tf.convert_to_tensor, written))
    assert max(copies.from_host) <= PIECE_BYTES
    assert set(copies.assigned_from) == {canonical(first)}
    for found, expected in zip(slot._model.variables, after.variables, strict=True):
        assert [component.device for component in found.value.values] == [first, second]
        for component in found.value.values:
            np.testing.assert_array_equal(component.numpy(), expected.numpy())
    x = np.random.default_rng(0).normal(size=(3, FEATURES)).astype(np.float32)
    for _ in strategy.extended.worker_devices:  # one example goes to one replica after the other
        np.testing.assert_allclose(slot.forward({"x": x[:1]})["outputs"], after(x[:1]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int8", "uint8", "int64", "bool"])
@pytest.mark.parametrize("shape", [(), (3,), (5000, 3), (1, 1, 20000), (0, 4)])
def test_a_value_of_any_kind_is_the_same_on_all_replicas(
    dtype: str, shape: tuple[int, ...], strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "PIECE_BYTES", PIECE_BYTES)
    value = tf.cast(tf.constant(np.random.default_rng(1).integers(0, 2, shape)), dtype)
    with strategy.scope(), weights.through_first_device(strategy):
        variable = tf.Variable(tf.zeros(shape, dtype))
        variable.assign(value)

    for component in variable.values:
        np.testing.assert_array_equal(component.numpy(), value.numpy())


def test_what_is_no_tensor_on_the_host_is_assigned_as_without_this(strategy: Any) -> None:
    with strategy.scope(), weights.through_first_device(strategy):
        text, number, other = tf.Variable("a"), tf.Variable(1.0), tf.Variable(2.0)
        text.assign("b")
        number.assign(other)
        tf.function(lambda: number.assign_add(tf.constant(1.0)))()
        number.assign_add(4.0)

    assert [component.numpy() for component in text.values] == [b"b", b"b"]
    assert [component.numpy() for component in number.values] == [7.0, 7.0]


def test_the_strategy_is_as_before_afterwards(strategy: Any) -> None:
    before = strategy.extended.update
    with pytest.raises(KeyError), weights.through_first_device(strategy):
        raise KeyError

    assert strategy.extended.update == before
