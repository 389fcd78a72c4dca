"""Constants are made of a model whose short loops are unrolled, which computes the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

from understudy.compat import layers_of
from understudy.evaluator.model import frozen, unrolling
from understudy.evaluator.model.slot import Slot

STEPS = 5
LAYERS = {
    "LSTM": lambda: keras.layers.LSTM(3),
    "GRU": lambda: keras.layers.GRU(3, return_sequences=True, go_backwards=True),
    "SimpleRNN": lambda: keras.layers.SimpleRNN(3),
}


def recurrent(layer: Any, steps: int | None = STEPS) -> Any:
    x = keras.Input((steps, 2), name="x")
    return keras.Model(x, keras.layers.Dense(2, name="y")(layer(keras.layers.Masking()(x))))


def operations(slot: Slot) -> set[str]:
    """Return the kinds of operations of the function that answers predictions."""
    assert slot._constants.forward is not None
    (function,) = slot._constants.forward.functions
    graph = function.graph.as_graph_def()
    inner = (node for each in graph.library.function for node in each.node_def)
    return {node.op for node in (*graph.node, *inner)}


@pytest.fixture
def frozen_slot(make_slot: Callable[..., Slot], monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Slot]:
    """Return a function that freezes a model; no time decides."""
    for name in ("MIN_GAIN", "MIN_GAIN_OF_EACH", "_TIMED_SECONDS"):
        monkeypatch.setattr(frozen, name, 0.0)

    def build(model: Any, replicas: int = 1) -> Slot:
        slot = make_slot(model, replicas=replicas, max_batch_size=4)
        slot.freeze(limit_mib=256, check_wanted=lambda: None)
        return slot

    return build


@pytest.mark.parametrize(("kind", "replicas"), [("LSTM", 1), ("GRU", 1), ("SimpleRNN", 2)])
def test_a_short_loop_is_unrolled_and_gives_the_same_bits(
    kind: str, replicas: int, frozen_slot: Callable[..., Slot]
) -> None:
    slot = frozen_slot(recurrent(LAYERS[kind]()), replicas)

    assert not {"While", "StatelessWhile", "LoopCond"} & operations(slot)
    inputs = {"x": np.random.default_rng(3).normal(size=(4, STEPS, 2)).astype(np.float32)}
    inputs["x"][1, 3:] = 0.0  # masked
    np.testing.assert_array_equal(slot.forward(inputs)["y"], slot.compute(inputs)[0]["y"])
    assert not any(getattr(layer, "unroll", False) for layer in layers_of(slot._model))


@pytest.mark.parametrize("steps", [None, unrolling.MOST_STEPS + 1])
def test_a_loop_of_many_or_any_number_of_steps_stays(steps: int | None, frozen_slot: Callable[..., Slot]) -> None:
    slot = frozen_slot(recurrent(LAYERS["SimpleRNN"](), steps))

    assert {"While", "StatelessWhile"} & operations(slot)


def test_a_layer_that_cannot_be_unrolled_keeps_its_loop(
    frozen_slot: Callable[..., Slot], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(layers: Any) -> Any:
        raise RuntimeError(f"no {len(layers)}")

    monkeypatch.setattr("understudy.evaluator.model.forward.unrolled", fail)

    assert {"While", "StatelessWhile"} & operations(frozen_slot(recurrent(LAYERS["SimpleRNN"]())))
