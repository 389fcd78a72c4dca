"""Checkpoints of several architectures in the slots of one manager."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from testkit.text_lifecycle import TextLifecycle, TextSlot
from understudy.checkpoints import LocalCheckpoint
from understudy.evaluator.evaluator_errors import (
    LoadError,
)


class BuildWatch(TextLifecycle):
    """Counts the slots that are alive when another is built."""

    def __init__(self, folder: Path, *, slots: int) -> None:
        super().__init__(folder, slots=slots)
        self.alive_at_build: list[int] = []
        self.refuses_to_reload = False
        self._alive: weakref.WeakSet[TextSlot] = weakref.WeakSet()

    def build(self, checkpoint: LocalCheckpoint) -> TextSlot:
        gc.collect()
        self.alive_at_build.append(len(self._alive))
        slot = super().build(checkpoint)
        self.built.clear()
        self._alive.add(slot)
        return slot

    def complain(self) -> None:
        super().complain()
        if self.refuses_to_reload:
            self.refuses_to_reload = False
            raise LoadError("it has other shapes")


def test_another_architecture_is_loaded_beside_the_serving_one_and_takes_its_place(lifecycle: TextLifecycle) -> None:
    lifecycle.publish(1, 3)
    lifecycle.publish(2, text="bignet 2")
    lifecycle.promote(1)
    lifecycle.acquire(2).release()
    assert lifecycle.loaded() == [1, 2]

    for step, architecture in ((2, "bignet"), (3, "net"), (1, "net"), (2, "bignet")):
        lifecycle.promote(step)
        with lifecycle.manager.borrow() as handle:
            assert (handle.step, handle.slot.architecture) == (step, architecture)


def test_a_slot_of_another_architecture_is_freed_before_the_new_one_is_built(
    make_lifecycle: Callable[..., Any],
) -> None:
    lifecycle = make_lifecycle(BuildWatch, slots=2)
    lifecycle.manager.start()
    lifecycle.publish(1, 2)
    lifecycle.publish(3, text="bignet 3")
    for step in (1, 2, 3):
        lifecycle.promote(step)

    assert lifecycle.loaded() == [2, 3]
    assert lifecycle.alive_at_build == [0, 1, 1]


def test_a_slot_that_refuses_the_weights_is_freed_before_the_new_one_is_built(
    make_lifecycle: Callable[..., Any],
) -> None:
    lifecycle = make_lifecycle(BuildWatch, slots=2)
    lifecycle.manager.start()
    lifecycle.publish(1, 2, 3)
    lifecycle.promote(1)
    lifecycle.promote(2)
    lifecycle.refuses_to_reload = True
    lifecycle.promote(3)

    assert lifecycle.alive_at_build == [0, 1, 1]


def test_a_new_architecture_that_cannot_be_built_leaves_its_slot_to_the_next(
    make_lifecycle: Callable[..., Any],
) -> None:
    lifecycle = make_lifecycle(BuildWatch, slots=2)
    lifecycle.manager.start()
    lifecycle.publish(1, 2, 4)
    lifecycle.publish(3, text="bignet 3")
    lifecycle.promote(1)
    lifecycle.promote(2)
    lifecycle.load_fails_with = LoadError("it is damaged")
    with pytest.raises(LoadError):
        lifecycle.promote(3)
    assert lifecycle.loaded() == [2]
    lifecycle.load_fails_with = None

    lifecycle.promote(4)

    assert lifecycle.loaded() == [2, 4]


def test_a_slot_that_does_not_take_the_weights_all_the_same_gives_way_to_a_new_one(lifecycle: TextLifecycle) -> None:
    def refuse(model_file: Path) -> bool:
        raise LoadError(f"{model_file.name} has other shapes")

    lifecycle.publish(1, 2, 3)
    lifecycle.promote(1)
    lifecycle.acquire(2).release()
    lifecycle.built[1].load = refuse  # type: ignore[method-assign]
    lifecycle.acquire(3).release()

    assert lifecycle.loaded() == [1, 3]
    assert len(lifecycle.built) == 3
