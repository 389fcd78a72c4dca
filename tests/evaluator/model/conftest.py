"""Slots on one to four replicas."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from understudy.evaluator.model.slot import Slot

MakeSlot = Callable[..., Slot]


@pytest.fixture(scope="session")
def strategy(logical_cpus: tuple[str, ...]) -> Callable[[int], Any]:
    """Return the strategy with this many replicas."""
    import tensorflow as tf

    @functools.cache
    def build(replicas: int) -> Any:
        return tf.distribute.MirroredStrategy(list(logical_cpus[:replicas]))

    return build


@pytest.fixture(scope="session")
def make_slot(strategy: Callable[[int], Any], tmp_path_factory: pytest.TempPathFactory) -> MakeSlot:
    """Save a model and load it into a slot."""

    def make(model: Any, *, replicas: int = 1, max_batch_size: int = 64) -> Slot:
        return Slot(strategy(replicas), save(model, tmp_path_factory.mktemp("model")), max_batch_size=max_batch_size)

    return make


def save(model: Any, folder: Path) -> Path:
    path = folder / "model.keras"
    model.save(path)
    return path
