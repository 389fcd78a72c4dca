"""Running out of memory: these models ask for a petabyte, and are refused.

TensorFlow's own allocator waits ten seconds before it refuses. Numpy's refuses at once, and TensorFlow reports it
with the same error.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from understudy.checkpoints.checkpoint_errors import DamagedCheckpointError, LocationGoneError
from understudy.evaluator.evaluator_errors import (
    InvalidInputError,
    LoadError,
    OutOfResourcesError,
    Resource,
    blame_machine,
    exhausted_resource,
)
from understudy.evaluator.model import replica_forward
from understudy.evaluator.model.forward import BatchLimits, ForwardPass
from understudy.evaluator.model.replica_forward import _Replica
from understudy.evaluator.model.slot import Slot
from understudy.evaluator.types import Batch

PETABYTE = 2**50


@keras.saving.register_keras_serializable("understudy_tests")
class Greedy(keras.layers.Layer):  # type: ignore[misc] # Keras is untyped
    """Gives what it is given, and takes a petabyte for more examples than it likes, of TensorFlow or of numpy."""

    def __init__(self, likes: int, *, of_tensorflow: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.likes = likes
        self.of_tensorflow = of_tensorflow

    def call(self, inputs: Any) -> Any:
        wanted = tf.where(tf.shape(inputs)[0] > self.likes, tf.constant(PETABYTE, tf.int64), tf.constant(1, tf.int64))
        if self.of_tensorflow:
            return inputs + tf.reduce_sum(tf.fill([wanted], tf.reduce_sum(inputs) * 0.0))
        zeros = tf.numpy_function(lambda count: np.zeros(count, np.float32), [wanted], tf.float32, stateful=False)
        return inputs + tf.reduce_sum(zeros)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "likes": self.likes, "of_tensorflow": self.of_tensorflow}


def greedy(likes: int, *, of_tensorflow: bool = False) -> Any:
    x = keras.Input((3,), name="x")
    model = keras.Model(x, Greedy(likes, of_tensorflow=of_tensorflow)(keras.layers.Dense(2, name="y")(x)))
    model.compile(loss="mse", metrics=["mae"])
    return model


def limit_of(slot: Slot, inputs: dict[str, Any]) -> int:
    return slot._pass.limits.limit(list(inputs.values()))


def rows(count: int) -> dict[str, Any]:
    return {"x": np.random.default_rng(0).normal(size=(count, 3)).astype(np.float32)}


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_batch_that_does_not_fit_goes_forward_in_pieces_that_do(
    make_slot: Callable[..., Slot], replicas: int
) -> None:
    model = greedy(likes=40, of_tensorflow=replicas == 1)
    slot = make_slot(model, replicas=replicas, max_batch_size=64)
    slot.warm_up()

    (outputs,) = slot.forward(rows(100)).values()

    np.testing.assert_allclose(outputs, model.layers[1](rows(100)["x"]), rtol=0, atol=1e-5)
    assert limit_of(slot, rows(100)) in range(20 * replicas, 40 * replicas + 1)


def test_a_batch_that_does_not_fit_is_scored_whole_all_the_same(make_slot: Callable[..., Slot]) -> None:
    batch = Batch(inputs=rows(33), targets={"targets": np.ones((33, 2), np.float32)})
    scores = []
    for likes in (32, 100):
        keras.utils.set_random_seed(1)
        slot = make_slot(greedy(likes), max_batch_size=64)
        scorer = slot.scorer()
        scores.append(scorer.result(scorer.update(scorer.start(), batch)))

    assert scores[0] == scores[1]


def test_a_limit_that_was_lowered_is_tried_again_with_the_next_checkpoint(make_slot: Callable[..., Slot]) -> None:
    slot = make_slot(greedy(likes=100), max_batch_size=64)
    slot.warm_up()
    slot._pass.limits.lower([rows(8)["x"]], 8, 4, MemoryError())
    assert limit_of(slot, rows(8)) == 4

    slot.warm_up()

    assert limit_of(slot, rows(8)) == 64


def test_one_callers_long_sequences_do_not_split_the_batches_of_others(
    make_slot: Callable[..., Slot], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = keras.Input((None, 3), name="x")
    slot = make_slot(keras.Model(x, keras.layers.Dense(2, name="y")(x)), max_batch_size=64)
    forward = slot._pass
    assert isinstance(forward, ForwardPass)
    sizes: list[tuple[int, ...]] = []
    function = forward._function

    def small_machine(*leaves: Any) -> Any:
        sizes.append(leaves[0].shape[:2])
        if leaves[0].shape[0] * leaves[0].shape[1] > 320:
            raise tensorflow_says(tf.errors.ResourceExhaustedError, "OOM when allocating tensor")
        return function(*leaves)

    monkeypatch.setattr(forward, "_function", small_machine)
    long, longer, short = (np.ones((64, length, 3), np.float32) for length in (10, 20, 5))
    for _ in range(2):
        for given in (long, short, longer):
            np.testing.assert_allclose(
                slot.forward({"x": given})["y"], slot._model(given, training=False), rtol=0, atol=1e-5
            )

    assert sizes.count((64, 10)) == 1
    assert sizes.count((64, 5)) == 2
    assert (64, 20) not in sizes
    assert sizes.count((32, 20)) == 1


@pytest.mark.parametrize("replicas", [1, 2])
def test_with_a_function_for_each_replica_what_does_not_fit_goes_in_pieces_too(
    strategy: Callable[[int], Any], replicas: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = greedy(likes=100)
    model.save(tmp_path / "model.keras")
    slot = Slot(strategy(replicas), tmp_path / "model.keras", max_batch_size=16, per_replica=True)
    sizes: list[int] = []
    monkeypatch.setattr(_Replica, "__call__", small_device(_Replica.__call__, sizes, memory=6))
    slot.warm_up()
    assert sorted(set(sizes), reverse=True) == [16, 8, 4, 2, 1]
    assert sizes.count(16) == sizes.count(8) == 1
    sizes.clear()

    given = rows(37)
    (outputs,) = slot.forward(given).values()
    np.testing.assert_allclose(outputs, model.layers[1](given["x"]), rtol=0, atol=1e-5)

    assert max(sizes) == 4
    assert limit_of(slot, given) == 4


def test_a_launched_batch_that_does_not_fit_when_its_outputs_are_fetched_runs_again_in_pieces(
    strategy: Callable[[int], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = greedy(likes=100)
    model.save(tmp_path / "model.keras")
    slot = Slot(strategy(2), tmp_path / "model.keras", max_batch_size=8, per_replica=True)
    given = rows(16)
    fetch = slot.launch(given)
    failures = [tensorflow_says(tf.errors.ResourceExhaustedError, "OOM when allocating tensor")]
    to_host = replica_forward._to_host

    def fetched(*arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return to_host(*arguments)

    monkeypatch.setattr(replica_forward, "_to_host", fetched)
    (outputs,) = fetch().values()
    np.testing.assert_allclose(outputs, model.layers[1](given["x"]), rtol=0, atol=1e-5)
    assert limit_of(slot, given) == 4


def test_with_a_function_for_each_replica_one_example_that_does_not_fit_says_so(
    strategy: Callable[[int], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy(likes=100).save(tmp_path / "model.keras")
    slot = Slot(strategy(2), tmp_path / "model.keras", max_batch_size=8, per_replica=True)
    monkeypatch.setattr(_Replica, "__call__", small_device(_Replica.__call__, [], memory=0))
    with pytest.raises(OutOfResourcesError, match="no memory for a single example"):
        slot.forward(rows(5))
    with pytest.raises(LoadError) as raised:
        slot.warm_up()
    assert exhausted_resource(raised.value) is Resource.MEMORY


def small_device(call: Callable[..., Any], sizes: list[int], *, memory: int) -> Callable[..., Any]:
    """Return a replica's call on a device that holds few examples; it notes how many it was called with."""

    def limited(self: _Replica, leaves: Any) -> Any:
        sizes.append(len(leaves[0]))
        if len(leaves[0]) > memory:
            raise tensorflow_says(tf.errors.ResourceExhaustedError, "OOM when allocating tensor")
        return call(self, leaves)

    return limited


def test_the_record_of_limits_is_bounded_and_the_newest_stay() -> None:
    limits = BatchLimits(64)
    for length in range(1000, 0, -1):
        limits.lower([np.empty((8, length))], 8, 4, MemoryError())

    assert len(limits._lowered) == 64
    assert limits.limit([np.empty((1, 1))]) == 4
    assert limits.limit([np.empty((1, 0))]) == 64
    assert limits.restore()
    assert not limits.restore()
    assert limits.limit([np.empty((1, 1))]) == 64


def test_a_prediction_for_which_there_is_no_memory_says_so(make_slot: Callable[..., Slot]) -> None:
    slot = make_slot(greedy(likes=8), max_batch_size=8)
    greedier = slot._model.layers[-1]
    greedier.likes = 0
    slot._trace()

    with pytest.raises(OutOfResourcesError, match="no memory for a single example"):
        slot.forward(rows(1))


def test_a_model_that_does_not_fit_is_no_bad_checkpoint(make_slot: Callable[..., Slot]) -> None:
    with pytest.raises(LoadError) as raised:
        make_slot(greedy(likes=0), max_batch_size=8)

    assert exhausted_resource(raised.value) is Resource.MEMORY


def tensorflow_says(kind: Any, text: str) -> Exception:
    error: Exception = kind(None, None, text)
    return error


def wrapped(error: Exception) -> Exception:
    outer = LoadError("the model cannot run")
    outer.__cause__ = error
    return outer


@pytest.mark.parametrize(
    ("error", "resource"),
    [
        (MemoryError(), Resource.MEMORY),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), Resource.MEMORY),
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), Resource.OTHER),
        (OSError(errno.EIO, os.strerror(errno.EIO)), Resource.OTHER),
        (OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)), Resource.OTHER),
        (OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN)), Resource.OTHER),
        (OSError(errno.EHOSTDOWN, os.strerror(errno.EHOSTDOWN)), Resource.OTHER),
        (OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED)), Resource.OTHER),
        (OSError(errno.EROFS, os.strerror(errno.EROFS)), Resource.OTHER),
        (LocationGoneError(Path("checkpoints")), Resource.OTHER),
        (OSError(errno.ENOENT, os.strerror(errno.ENOENT)), None),
        (tensorflow_says(tf.errors.UnknownError, "x.index; Transport endpoint is not connected"), Resource.OTHER),
        (tensorflow_says(tf.errors.ResourceExhaustedError, "OOM when allocating tensor"), Resource.MEMORY),
        (tensorflow_says(tf.errors.ResourceExhaustedError, "x.index; No space left on device"), Resource.OTHER),
        (tensorflow_says(tf.errors.InternalError, "CUDA_ERROR_OUT_OF_MEMORY: out of memory"), Resource.MEMORY),
        (tensorflow_says(tf.errors.UnknownError, "std::bad_alloc"), Resource.MEMORY),
        (tensorflow_says(tf.errors.InternalError, "Failed to allocate scratch space"), Resource.MEMORY),
        (tensorflow_says(tf.errors.InternalError, "Blas GEMM launch failed"), None),
        (wrapped(MemoryError("8 GiB")), Resource.MEMORY),
        (wrapped(ValueError("bad object header")), None),
        (InvalidInputError("'out of memory' is no dtype"), None),
        (DamagedCheckpointError("unable to allocate what it claims"), None),
    ],
)
def test_what_the_machine_lacks_is_told_from_what_a_checkpoint_got_wrong(
    error: Exception, resource: Resource | None
) -> None:
    assert exhausted_resource(error) is resource
    assert isinstance(blame_machine(error), OutOfResourcesError) is (resource is not None)
