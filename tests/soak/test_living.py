"""Counting what is alive."""

from __future__ import annotations

import gc

import keras

from testkit.living import living


class Ring:
    """An object that refers to itself."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.ring = self


def test_objects_of_a_class_count_until_they_are_collected() -> None:
    gc.disable()
    try:
        with living(Ring) as rings:
            kept = Ring(1.0)
            Ring(2.0)
            assert len(rings) == 2
            gc.collect()
            assert list(rings) == [kept]
        Ring(3.0)
        assert list(rings) == [kept]
    finally:
        gc.enable()


def test_models_of_every_kind_count_once() -> None:
    x = keras.Input((2,))
    with living(keras.Model) as models:
        made = [keras.Model(x, keras.layers.Dense(1)(x)), keras.Sequential([keras.layers.Dense(1)])]
        made.append(keras.Model.from_config(made[0].get_config()))
        assert set(made) == set(models)
