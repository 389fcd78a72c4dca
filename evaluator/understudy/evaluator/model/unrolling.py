"""Loops of recurrent layers with few steps, which are unrolled: TensorFlow's loop costs more than a small step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import keras

from understudy.compat import layers_of

MOST_STEPS: Final = 64
"""How many steps of all layers together are unrolled. Each adds some 20 operations to the graph."""


def short_loops(model: Any) -> list[Any]:
    """Return the recurrent layers of a model that may be unrolled; none if they have too many steps together.

    The number of steps must be fixed, so layers that are called more than once, or by other layers, are left out.
    """
    layers = {layer: steps for layer in layers_of(model) if (steps := _steps_of(layer)) is not None}
    return list(layers) if sum(layers.values()) <= MOST_STEPS else []


@contextmanager
def unrolled(layers: Sequence[Any]) -> Iterator[None]:
    """Have these layers traced without a loop. A function that another thread traces meanwhile computes the same."""
    for layer in layers:
        layer.unroll = True
    try:
        yield
    finally:
        for layer in layers:
            layer.unroll = False


def _steps_of(layer: Any) -> int | None:
    if not isinstance(layer, keras.layers.RNN) or layer.unroll or layer.stateful:
        return None
    try:
        steps = keras.tree.flatten(layer.input)[0].shape[1]  # masks and states come after the sequence
    except (AttributeError, ValueError):  # it is not called by a graph of layers, or more than once
        return None
    return None if steps is None else int(steps)
