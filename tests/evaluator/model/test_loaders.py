"""Slots that are loaded from what other people's programs write."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from understudy.checkpoints import ModelKind
from understudy.evaluator.evaluator_errors import ArchitectureMismatchError, LoadError
from understudy.evaluator.model.loaders import loader_for
from understudy.evaluator.model.slot import Slot
from understudy.evaluator.types import Batch, MetricSpec

REPLICAS = 3
X = np.random.default_rng(5).normal(size=(7, 3)).astype(np.float32)


@pytest.fixture(scope="module")
def strategy(logical_cpus: tuple[str, ...]) -> Any:
    return tf.distribute.MirroredStrategy(list(logical_cpus[:REPLICAS]))


class Scaled(tf.Module):  # type: ignore[misc]
    """Multiplies by a variable, adds a constant of its graph, and perhaps centres the batch."""

    def __init__(self, scale: float, *, constant: float = 0.0, centred: bool = False, width: int | None = 3) -> None:
        self.scale = tf.Variable(scale)

        def call(x: Any) -> dict[str, Any]:
            centre = tf.reduce_mean(x, axis=0) if centred else 0.0
            return {"y": (x - centre) * self.scale + constant}

        self.call = tf.function(call, input_signature=[tf.TensorSpec((None, width), tf.float32, name="x")])


def save(module: Scaled, folder: Path, **signatures: Any) -> Path:
    tf.saved_model.save(module, str(folder), signatures=signatures or {"serving_default": module.call})
    return folder


def slot_of(strategy: Any, folder: Path) -> Slot:
    return Slot(strategy, folder, max_batch_size=8, loader=loader_for(ModelKind.SAVED_MODEL, None))


def mae(slot: Slot) -> float:
    scorer = slot.scorer([MetricSpec(name="mae")])
    batch = Batch(inputs={"x": X}, targets={"targets": np.zeros_like(X)})
    return scorer.result(scorer.update(scorer.start(), batch))["mae"]


def test_a_saved_model_brings_its_own_variables_and_constants(strategy: Any, tmp_path: Path) -> None:
    slot = slot_of(strategy, save(Scaled(2.0, constant=1.0), tmp_path / "1"))
    np.testing.assert_allclose(slot.forward({"x": X})["y"], X * 2 + 1, rtol=1e-6)
    slot.load(save(Scaled(5.0, constant=-1.0), tmp_path / "2"))
    np.testing.assert_allclose(slot.forward({"x": X})["y"], X * 5 - 1, rtol=1e-6)
    assert mae(slot) == pytest.approx(np.abs(X * 5 - 1).mean(), rel=1e-6)
    assert [variable.shape for variable in slot._model.variables] == [()]


class Counting(tf.Module):  # type: ignore[misc]
    """Adds how many times it was called."""

    def __init__(self) -> None:
        self.calls = tf.Variable(0.0)

    @tf.function(input_signature=[tf.TensorSpec((None, 3), tf.float32, name="x")])  # type: ignore[untyped-decorator]
    def call(self, x: Any) -> dict[str, Any]:
        return {"y": x + self.calls.assign_add(1.0)}


def test_calls_whose_changes_are_undone_take_back_none_of_another_thread(tmp_path: Path) -> None:
    tf.saved_model.save(module := Counting(), str(tmp_path / "1"), signatures={"serving_default": module.call})
    one = tf.distribute.MirroredStrategy(["CPU:0"])
    slot = slot_of(one, tmp_path / "1")

    def calls() -> float:
        return float(slot.forward({"x": np.zeros((1, 3), np.float32)})["y"][0, 0])

    first = calls()
    with ThreadPoolExecutor(1) as threads:
        with slot.keeping_variables():
            assert calls() == first + 1
            other = threads.submit(calls)
            with pytest.raises(TimeoutError):
                other.result(timeout=0.2)
            assert calls() == first + 2
        assert other.result(timeout=60) == first + 1
    assert calls() == first + 2


def test_a_version_begins_with_the_variables_of_its_checkpoint_and_keeps_them_in_warm_ups(tmp_path: Path) -> None:
    tf.saved_model.save(module := Counting(), str(tmp_path / "1"), signatures={"serving_default": module.call})
    slot = slot_of(tf.distribute.MirroredStrategy(["CPU:0"]), tmp_path / "1")
    slot.warm_up()
    for number in range(1, 4):
        np.testing.assert_array_equal(slot.forward({"x": np.zeros((1, 3), np.float32)})["y"], [[number] * 3])
        slot.warm_up()
        slot.try_out()


def test_a_saved_model_whose_examples_depend_on_each_other_is_scored_whole(strategy: Any, tmp_path: Path) -> None:
    slot = slot_of(strategy, save(Scaled(2.0, centred=True), tmp_path / "1"))
    assert "scored whole on one replica" in slot.notes[0]
    assert mae(slot) == pytest.approx(np.abs((X - X.mean(axis=0)) * 2).mean(), rel=1e-5)
    slot.load(save(Scaled(5.0, centred=True), tmp_path / "2"))
    assert mae(slot) == pytest.approx(np.abs((X - X.mean(axis=0)) * 5).mean(), rel=1e-5)


def test_a_saved_model_that_takes_something_else_is_another_architecture(strategy: Any, tmp_path: Path) -> None:
    slot = slot_of(strategy, save(Scaled(2.0), tmp_path / "1"))
    with pytest.raises(ArchitectureMismatchError):
        slot.load(save(Scaled(2.0, width=4), tmp_path / "2"))


def test_exports_of_a_model_that_was_built_again_take_the_same_and_load_into_the_slot(
    strategy: Any, tmp_path: Path
) -> None:
    def exported(name: str, *, scale: float, input_names: tuple[str | None, str | None] = (None, None)) -> Path:
        first, second = (keras.Input((3,), name=given) for given in input_names)
        model = keras.Model([first, second], first * scale - second)
        model.export(tmp_path / name, verbose=False)
        return tmp_path / name

    slot = slot_of(strategy, exported("1", scale=2.0))
    assert [spec.name for spec in slot.signature.inputs] == ["inputs", "inputs_1"]
    keras.Input((3,))
    for number in (2, 3):
        slot.load(exported(str(number), scale=float(number)))
        outputs = slot.forward({"inputs": X, "inputs_1": X + 1})
        np.testing.assert_allclose(outputs["output_0"], X * number - (X + 1), rtol=1e-5)
    with pytest.raises(ArchitectureMismatchError):
        slot.load(exported("named", scale=2.0, input_names=("a", "b")))


def test_a_lone_signature_is_served_whatever_its_name_and_of_several_the_default(strategy: Any, tmp_path: Path) -> None:
    module = Scaled(2.0)
    assert slot_of(strategy, save(module, tmp_path / "1", scale=module.call)).signature.inputs[0].name == "x"
    with pytest.raises(LoadError, match=r"has the signatures \['a', 'b'\]; one called 'serving_default' was expected"):
        slot_of(strategy, save(module, tmp_path / "2", a=module.call, b=module.call))


def test_a_saved_model_of_a_fixed_batch_is_refused(strategy: Any, tmp_path: Path) -> None:
    module = Scaled(2.0)
    fixed = tf.function(lambda x: {"y": x}, input_signature=[tf.TensorSpec((1, 3), tf.float32, name="x")])
    with pytest.raises(LoadError, match=r"input 'x' of the SavedModel has shape \(1, 3\).*batch size of None"):
        slot_of(strategy, save(module, tmp_path / "1", serving_default=fixed))


@pytest.mark.parametrize("kind", [ModelKind.WEIGHTS, ModelKind.TF_CHECKPOINT])
def test_variables_alone_need_somebody_who_builds_the_model(kind: ModelKind) -> None:
    with pytest.raises(LoadError, match="give the experiment that builds it"):
        loader_for(kind, None)


def test_variables_without_an_optimizer_s_load_into_a_compiled_model(tmp_path: Path) -> None:
    def build(*, compiled: bool = True) -> keras.Model:
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        if compiled:
            model.compile("adam", "mse", metrics=["mae"])
        return model

    published = build(compiled=False)
    prefix = tf.train.Checkpoint(model=published).write(str(tmp_path / "ckpt-1"))

    built = loader_for(ModelKind.TF_CHECKPOINT, build).build(Path(prefix))

    np.testing.assert_array_equal(built.model(X), published(X))
    assert built.compile_config["loss"] == "mse"
