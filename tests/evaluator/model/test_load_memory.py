"""How much memory a load takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from testkit.resident import peak_mib
from understudy.checkpoints.kinds import ModelKind
from understudy.evaluator.model.loaders import loader_for
from understudy.evaluator.model.slot import Slot

WIDTH = 4096
WEIGHTS_MIB = 64


@pytest.fixture
def wide() -> keras.Model:
    return keras.Sequential([keras.Input([WIDTH]), keras.layers.Dense(WIDTH, name="wide")])


@pytest.mark.parametrize(
    ("name", "kind"),
    [("model.keras", ModelKind.KERAS), ("model.weights.h5", ModelKind.WEIGHTS)],
    ids=["keras", "weights"],
)
def test_building_a_model_takes_little_more_memory_than_its_weights(
    strategy: Callable[[int], Any], wide: keras.Model, tmp_path: Path, name: str, kind: ModelKind
) -> None:
    file = tmp_path / name
    (wide.save if kind is ModelKind.KERAS else wide.save_weights)(file)
    slots: list[Slot] = []

    def build() -> keras.Model:
        return keras.models.clone_model(wide)

    def load() -> None:
        slots.append(Slot(strategy(1), file, max_batch_size=8, loader=loader_for(kind, build)))

    assert peak_mib(load) < 1.5 * WEIGHTS_MIB
    example = np.eye(1, WIDTH, dtype=np.float32)
    (output,) = slots[0].forward({slots[0].signature.inputs[0].name: example}).values()
    np.testing.assert_array_equal(output[0], wide.layers[-1].kernel.numpy()[0])
