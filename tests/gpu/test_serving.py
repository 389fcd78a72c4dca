"""A batch over all devices: the same numbers as one device, the right errors, and swaps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.evaluator.model import weights
from understudy.evaluator.model.slot import Slot

Array = npt.NDArray[Any]
Load = Callable[..., Slot]

TOKENS = 20
STEPS = 6


def dense() -> Any:
    x = keras.Input((16,), name="x")
    hidden = keras.layers.Dense(64, activation="relu")(x)
    return keras.Model(x, keras.layers.Dense(4, name="y")(hidden))


def masked(layer: type[keras.layers.Layer]) -> Any:
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    embedded = keras.layers.Embedding(TOKENS, 8, mask_zero=True)(tokens)
    return keras.Model(tokens, keras.layers.Dense(2, name="y")(layer(8)(embedded)))


@pytest.fixture(scope="module")
def load(devices: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Return what saves a model and loads it on some of the devices, on all if none are given."""

    def onto(model: Any, chosen: tuple[str, ...] = devices) -> Slot:
        file = tmp_path_factory.mktemp("model") / "model.keras"
        model.save(file)
        slot = Slot(tf.distribute.MirroredStrategy(list(chosen)), file, max_batch_size=64)
        slot.warm_up()
        return slot

    return onto


def on_cpu(model: Any, inputs: Array) -> Array:
    with tf.device("CPU:0"):
        outputs: Array = model(inputs, training=False).numpy()
    return outputs


@pytest.mark.parametrize("rows", [1, 2, 3, 17, 64, 150])
def test_a_batch_over_all_devices_gives_what_one_gives(load: Load, devices: tuple[str, ...], rows: int) -> None:
    model = dense()
    x = np.random.default_rng(rows).normal(size=(rows, 16)).astype(np.float32)

    alone, together = load(model, devices[:1]), load(model)

    assert together.replicas == len(devices)
    np.testing.assert_allclose(together.forward({"x": x})["y"], alone.forward({"x": x})["y"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layer", [keras.layers.LSTM, keras.layers.GRU])
def test_a_masked_recurrent_model_loads_and_gives_what_the_cpu_gives(
    load: Load, layer: type[keras.layers.Layer]
) -> None:
    model = masked(layer)
    tokens = np.random.default_rng(1).integers(1, TOKENS, (9, STEPS)).astype(np.int32)
    for row, length in enumerate((6, 1, 2, 3, 4, 5, 6, 2, 1)):
        tokens[row, length:] = 0  # padded on the right, as cuDNN wants it

    slot = load(model)

    np.testing.assert_allclose(slot.forward({"tokens": tokens})["y"], on_cpu(model, tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("token", [-TOKENS - 1, TOKENS])
def test_an_id_that_the_table_does_not_have_is_refused(load: Load, token: int) -> None:
    tokens = np.full((3, STEPS), 1, np.int32)
    tokens[1, 2] = token

    slot = load(masked(keras.layers.GRU))

    with pytest.raises(InvalidInputError, match=str(token)):
        slot.forward({"tokens": tokens})


def test_other_weights_answer_after_a_swap_and_nothing_is_traced_anew(load: Load, tmp_path: Path) -> None:
    first, second = dense(), dense()
    second.save(tmp_path / "second.keras")
    x = np.ones((5, 16), np.float32)
    slot = load(first)
    traces = slot.traces

    np.testing.assert_allclose(slot.forward({"x": x})["y"], on_cpu(first, x), rtol=1e-4, atol=1e-5)
    slot.load(tmp_path / "second.keras")

    np.testing.assert_allclose(slot.forward({"x": x})["y"], on_cpu(second, x), rtol=1e-4, atol=1e-5)
    assert slot.traces == traces


def test_new_weights_are_the_same_bits_on_all_devices(
    devices: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "PIECE_BYTES", 1 << 10)
    first, second = dense(), dense()
    first.save(tmp_path / "first.keras")
    second.save(tmp_path / "second.keras")
    strategy = tf.distribute.MirroredStrategy(list(devices))
    slot = Slot(strategy, tmp_path / "first.keras", max_batch_size=8, per_replica=True)

    slot.load(tmp_path / "second.keras")

    for found, written in zip(slot._model.variables, second.variables, strict=True):
        for component in found.value.values:
            np.testing.assert_array_equal(component.numpy(), written.numpy())


def test_the_devices_can_be_tried_out(load: Load) -> None:
    slot = load(masked(keras.layers.LSTM))
    traces = slot.traces
    slot.try_out()
    assert slot.traces == traces


@pytest.mark.gpu
def test_a_request_s_tensors_do_not_pass_through_the_first_gpu(load: Load, several: tuple[str, ...]) -> None:
    x = keras.Input((1 << 16,), name="x")
    slot = load(keras.Model(x, keras.layers.Activation("relu", name="y")(x)))
    batch = {"x": np.ones((64, 1 << 16), np.float32)}  # 16 MiB
    slot.forward(batch)
    for gpu in several:
        tf.config.experimental.reset_memory_stats(gpu)
    before = [tf.config.experimental.get_memory_info(gpu)["peak"] for gpu in several]

    slot.forward(batch)

    grown = [
        tf.config.experimental.get_memory_info(gpu)["peak"] - was for gpu, was in zip(several, before, strict=True)
    ]
    assert min(grown) > 0  # each had a part
    assert grown[0] < 1.5 * min(grown[1:])  # and the first not the others', too
