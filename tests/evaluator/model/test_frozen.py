"""Constants for the weights: the same predictions, the same scores, and variables where constants do not do."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from testkit import more_sample_models, sample_models
from testkit.preloading import preloaded
from understudy.checkpoints import ModelKind
from understudy.evaluator.evaluator_errors import (
    FreezingCancelledError,
    InvalidInputError,
    NoFasterError,
    NotFrozenError,
)
from understudy.evaluator.model import frozen
from understudy.evaluator.model.loaders import loader_for
from understudy.evaluator.model.reclaiming import reclaim_memory
from understudy.evaluator.model.slot import Slot
from understudy.evaluator.types import Arrays, Batch

LIMIT_MIB = 64
THREADS = 3
CALLS = 60

MODELS: dict[str, tuple[Callable[[], Any], Callable[..., tuple[Any, Any, Any]]]] = {
    "images with BatchNorm": (sample_models.image_classifier, sample_models.image_data),
    "nested structures": (sample_models.two_by_two, sample_models.two_by_two_data),
    "a mask and any length": (sample_models.tagger, sample_models.tagger_data),
    "a loop": (sample_models.recurrent, sample_models.tagger_data),
    "a subclass": (sample_models.subclassed, sample_models.one_hot_data),
    "a lookup table": (more_sample_models.words, more_sample_models.words_data),
    "attention": (more_sample_models.attention, more_sample_models.attention_data),
}


@pytest.fixture(autouse=True)
def constants_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no time decide."""
    monkeypatch.setattr(frozen, "MIN_GAIN", 0.0)
    monkeypatch.setattr(frozen, "MIN_GAIN_OF_EACH", 0.0)
    monkeypatch.setattr(frozen, "_TIMED_SECONDS", 0.0)


def freeze(slot: Slot, limit_mib: int = LIMIT_MIB) -> int:
    return slot.freeze(limit_mib=limit_mib, check_wanted=lambda: None)


def is_frozen(slot: Slot) -> bool:
    return slot.predict_note == "Predict uses constants for the weights"


def generated(slot: Slot, examples: int) -> Arrays:
    return slot._probe.example(examples)


def assert_close(came: Arrays, expected: Arrays) -> None:
    assert came.keys() == expected.keys()
    for name, array in came.items():
        largest = np.max(np.abs(expected[name]))
        np.testing.assert_allclose(array, expected[name], rtol=0, atol=float(largest) * frozen.TOLERANCE)


def dense(scale: float = 1.0) -> Any:
    model = keras.Sequential([keras.Input((3,), name="x"), keras.layers.Dense(2, name="y")])
    model.set_weights([np.full((3, 2), scale, np.float32), np.zeros(2, np.float32)])
    model.compile("sgd", "mse", metrics=["mae"])
    return model


@pytest.mark.parametrize(
    ("name", "replicas"),
    [*((name, 2) for name in MODELS), ("a loop", 1), ("images with BatchNorm", 1), ("images with BatchNorm", 4)],
)
def test_a_frozen_slot_predicts_the_same_for_every_number_of_examples(
    name: str, replicas: int, make_slot: Callable[..., Slot]
) -> None:
    slot = make_slot(MODELS[name][0](), replicas=replicas, max_batch_size=4)
    batches = [generated(slot, examples) for examples in (1, 2, 3, 7, 18)]
    expected = [slot.forward(batch) for batch in batches]

    assert 0 < freeze(slot) < LIMIT_MIB * 2**20

    assert is_frozen(slot)
    for batch, outputs in zip(batches, expected, strict=True):
        assert_close(slot.forward(batch), outputs)
        assert_close(slot.launch(batch)(), outputs)
    assert slot.traces == 1


_FEW_FILES = """
import os, resource, sys
from pathlib import Path
import tensorflow as tf
from understudy.evaluator.evaluator_errors import NotFrozenError
from understudy.evaluator.model import frozen
from understudy.evaluator.model.slot import Slot

frozen.MIN_GAIN = frozen.MIN_GAIN_OF_EACH = frozen._TIMED_SECONDS = 0.0
slot = Slot(tf.distribute.MirroredStrategy(["CPU:0"]), Path(sys.argv[1]), max_batch_size=4)
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
taken = []
try:
    while True:
        taken.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
before = 0
for free in (0, 1, 4, 16):
    for _ in range(free - before):
        os.close(taken.pop())
    before = free
    try:
        slot.freeze(limit_mib=64, check_wanted=lambda: None)
    except NotFrozenError as error:
        print(error)
while taken:
    os.close(taken.pop())
slot.freeze(limit_mib=64, check_wanted=lambda: None)
print(slot.predict_note)
"""


def test_a_model_is_not_frozen_where_few_files_can_be_opened_and_the_process_goes_on(tmp_path: Path) -> None:
    dense().save(tmp_path / "model.keras")
    command = [sys.executable, "-c", _FEW_FILES, str(tmp_path / "model.keras")]
    environ = {**os.environ, **preloaded()}
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=250, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    *refused, last = ended.stdout.splitlines()
    assert [line.split()[0] for line in refused] == ["0", "1", "4", "16"]
    assert all("more files can be opened, and making constants needs 32; raise the limit" in line for line in refused)
    assert last == "Predict uses constants for the weights"


@pytest.mark.parametrize("name", ["images with BatchNorm", "nested structures", "a mask and any length"])
def test_freezing_changes_no_score(name: str, make_slot: Callable[..., Slot]) -> None:
    build, data = MODELS[name]
    slot = make_slot(build(), replicas=2)
    x, y, weights = data(np.random.default_rng(0), 9)
    inputs = x if isinstance(x, dict) else {slot.signature.inputs[0].name: x}
    targets = y if isinstance(y, dict) else {"targets": y}
    sample_weights = {} if weights is None else weights if isinstance(weights, dict) else {"sample_weights": weights}
    batch = Batch(inputs=inputs, targets=targets, sample_weights=sample_weights)

    def score() -> dict[str, float]:
        scorer = slot.scorer()
        return scorer.result(scorer.update(scorer.start(), batch))

    before = score()
    freeze(slot)

    assert score() == before


@pytest.mark.parametrize(
    ("kind", "replicas"),
    [*((kind, 2) for kind in ModelKind), *itertools.product([ModelKind.KERAS, ModelKind.SAVED_MODEL], [1, 4])],
)
def test_a_checkpoint_of_every_format_is_frozen(
    kind: ModelKind, replicas: int, strategy: Callable[[int], Any], tmp_path: Path
) -> None:
    def save(scale: float) -> Path:
        model, path = dense(scale), tmp_path / f"{scale}"
        if kind is ModelKind.TF_CHECKPOINT:
            path = Path(tf.train.Checkpoint(model=model).write(str(path)))
        elif kind is ModelKind.SAVED_MODEL:
            model.export(str(path), verbose=False)
        elif kind is ModelKind.WEIGHTS:
            path = path.with_suffix(".weights.h5")
            model.save_weights(path)
        else:
            path = path.with_suffix(".keras" if kind is ModelKind.KERAS else ".h5")
            model.save(path)
        return path

    slot = Slot(strategy(replicas), save(2.0), max_batch_size=4, loader=loader_for(kind, dense))
    other = save(3.0)
    (name,) = (spec.name for spec in slot.signature.inputs)
    for scale in (2.0, 3.0):
        freeze(slot)
        assert is_frozen(slot)
        assert not slot._constants.forward.functions[0].captured_inputs  # type: ignore[union-attr]
        (outputs,) = slot.forward({name: np.ones((5, 3), np.float32)}).values()
        np.testing.assert_array_equal(outputs, np.full((5, 2), 3 * scale))
        slot.load(other)
        assert not is_frozen(slot)
        (outputs,) = slot.forward({name: np.ones((5, 3), np.float32)}).values()
        np.testing.assert_array_equal(outputs, np.full((5, 2), 9.0))


def test_batches_that_run_while_a_slot_is_frozen_and_thawed_are_right(make_slot: Callable[..., Slot]) -> None:
    slot = make_slot(sample_models.image_classifier(), replicas=2)
    batches = [generated(slot, examples) for examples in (1, 5, 8)]
    expected = [slot.forward(batch) for batch in batches]
    failures: list[BaseException] = []

    def predict() -> None:
        try:
            for _ in range(CALLS):
                for batch, outputs in zip(batches, expected, strict=True):
                    assert_close(slot.forward(batch), outputs)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            failures.append(error)

    threads = [threading.Thread(target=predict) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        freeze(slot)
        slot.thaw()
    assert failures == []


def test_values_that_the_model_refuses_are_refused_and_the_slot_stays_frozen(make_slot: Callable[..., Slot]) -> None:
    x = keras.Input((1,), name="x")
    slot = make_slot(keras.Model(x, keras.layers.Dense(1)(keras.ops.take(keras.ops.arange(3.0), _as_ids(x)))))
    freeze(slot)
    with pytest.raises(InvalidInputError):
        slot.forward({"x": np.array([[9.0]], np.float32)})
    assert is_frozen(slot)


def _as_ids(x: Any) -> Any:
    return keras.ops.cast(keras.ops.abs(x), "int32")


def test_a_batch_on_which_constants_alone_fail_runs_on_variables(
    make_slot: Callable[..., Slot], monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = make_slot(dense())
    freeze(slot)

    def fail(*_: Any) -> Any:
        raise tf.errors.InternalError(None, None, "no such kernel")

    monkeypatch.setattr(slot._constants.forward, "_function", fail)
    outputs = slot.forward({"x": np.ones((2, 3), np.float32)})["y"]

    np.testing.assert_array_equal(outputs, np.full((2, 2), 3.0))
    assert slot.predict_note == "Predict uses variables for the weights: no such kernel"


class Counts(keras.layers.Layer):  # type: ignore[misc]
    """Counts its calls."""

    def build(self, _: Any) -> None:
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, inputs: Any) -> Any:
        self.calls.assign(self.calls + 1.0)
        return inputs * 1.0


def alone(layer: Any) -> Any:
    x = keras.Input((3,), name="x")
    return keras.Model(x, layer(x))


LEFT: dict[str, tuple[Callable[[], Any], str]] = {
    "state": (lambda: alone(Counts()), r"changes its state while it predicts \(AssignVariableOp\)"),
    "random": (lambda: alone(sample_models.Noise()), "draws random numbers"),
    "no variables": (lambda: alone(keras.layers.Rescaling(2.0)), "has no variables"),
}


@pytest.mark.parametrize("name", LEFT)
def test_a_model_that_cannot_be_frozen_keeps_its_variables_and_says_why(
    name: str, strategy: Callable[[int], Any], tmp_path: Path
) -> None:
    build, reason = LEFT[name]
    model = build()
    model.export(str(tmp_path / "model"), verbose=False)
    loader = loader_for(ModelKind.SAVED_MODEL, None)
    slot = Slot(strategy(2), tmp_path / "model", max_batch_size=4, loader=loader)

    with pytest.raises(NotFrozenError, match=reason):
        freeze(slot)

    assert slot.predict_note.startswith("Predict uses variables for the weights: ")
    assert slot.forward({"x": np.ones((3, 3), np.float32)})


def test_constants_take_no_more_memory_than_they_may(make_slot: Callable[..., Slot]) -> None:
    model = keras.Sequential([keras.Input((512,)), keras.layers.Dense(512, use_bias=False)])
    slots = {replicas: make_slot(model, replicas=replicas) for replicas in (1, 2)}
    for replicas, slot in slots.items():
        least = frozen.MEMORY_FACTOR * replicas
        with pytest.raises(NotFrozenError, match=rf"about \d+ MiB, and frozen_memory_mib is {least}"):
            freeze(slot, least)
        assert not is_frozen(slot)
        assert least * 2**20 < freeze(slot, 2 * least) < 2 * least * 2**20


def test_outputs_that_differ_too_much_leave_the_variables(
    make_slot: Callable[..., Slot], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen, "with_constants", lambda function, _: _off_by(function, 3e-6))
    slot = make_slot(dense())
    with pytest.raises(NotFrozenError, match=r"output 'y' differs by 3\.\de-06 of its largest value"):
        freeze(slot)
    np.testing.assert_array_equal(slot.forward({"x": np.ones((1, 3), np.float32)})["y"], [[3.0, 3.0]])


def _off_by(function: Any, share: float) -> Any:
    signature = [tf.TensorSpec([None, 3])]
    off = tf.function(lambda x: [y + share * tf.reduce_max(tf.abs(y)) for y in function(x)], input_signature=signature)
    return off.get_concrete_function()


@pytest.mark.parametrize(
    ("came", "expected", "difference"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.5], [1.0, 2.0], 0.25),
        ([np.nan, np.inf], [np.nan, np.inf], 0.0),
        ([np.nan, 1.5], [np.nan, 1.0], 0.5),
        ([np.nan], [1.0], np.nan),
        ([1.0], [np.nan], np.inf),
        ([0.5], [0.0], 0.5),
        (np.array([1, 2]), np.array([1, 3]), np.inf),
        (np.array([b"a"], object), np.array([b"a"], object), 0.0),
        (np.array([b"a"], object), np.array([b"b"], object), np.inf),
        (np.zeros(2), np.zeros(3), np.inf),
    ],
)
def test_differences_are_shares_of_the_largest_value(came: Any, expected: Any, difference: float) -> None:
    np.testing.assert_equal(frozen._difference(np.asarray(came), np.asarray(expected)), difference)


def test_a_model_that_gains_nothing_is_timed_once(
    make_slot: Callable[..., Slot], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(frozen, "MIN_GAIN", 1e9)
    slot = make_slot(dense())
    with pytest.raises(NoFasterError, match=r"constants make it no faster; the warm-up's batches ran at [\d.]+, "):
        freeze(slot)
    dense(2.0).save(tmp_path / "other.keras")
    slot.load(tmp_path / "other.keras")

    monkeypatch.setattr(frozen, "with_constants", None)
    with pytest.raises(NoFasterError):
        freeze(slot)


def test_a_model_that_gained_is_not_timed_again(
    make_slot: Callable[..., Slot], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slot = make_slot(dense())
    freeze(slot)
    dense(2.0).save(tmp_path / "other.keras")
    slot.load(tmp_path / "other.keras")

    monkeypatch.setattr(frozen, "MIN_GAIN", 1e9)
    freeze(slot)
    assert is_frozen(slot)


def test_freezing_stops_at_every_part_of_the_work(make_slot: Callable[..., Slot]) -> None:
    slot = make_slot(dense())
    asked = 0

    def count() -> None:
        nonlocal asked
        asked += 1

    slot.freeze(limit_mib=LIMIT_MIB, check_wanted=count)
    for allowed in range(asked):
        other = make_slot(dense())
        left = iter(range(allowed))

        def check() -> None:
            if next(left, None) is None:  # noqa: B023 - called in this round
                raise FreezingCancelledError("another version is serving")

        with pytest.raises(FreezingCancelledError):
            other.freeze(limit_mib=LIMIT_MIB, check_wanted=check)
        assert not is_frozen(other)


def test_a_thawed_function_is_freed_with_the_functions_of_its_loops(make_slot: Callable[..., Slot]) -> None:
    slot = make_slot(sample_models.recurrent())
    freeze(slot)
    function = slot._constants.forward.functions[0]  # type: ignore[union-attr]
    library = [inner.signature.name for inner in function.graph.as_graph_def().library.function]
    assert library
    assert all(map(_is_known, library))
    alive = weakref.ref(function)
    del function

    slot.thaw()
    reclaim_memory()
    gc.collect()

    assert alive() is None
    assert not any(map(_is_known, library))
    assert slot.forward(generated(slot, 3))


def _is_known(name: str) -> bool:
    from tensorflow.python.eager import context

    return bool(context.context().has_function(name))


@pytest.mark.timeout(60)
def test_a_small_model_is_timed_no_longer_than_it_takes_to_tell(
    make_slot: Callable[..., Slot], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen, "_TIMED_SECONDS", 3600.0)
    slot = make_slot(dense(), replicas=1, max_batch_size=4)
    freeze(slot)
    assert is_frozen(slot)
