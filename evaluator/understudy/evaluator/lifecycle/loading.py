"""Puts a checkpoint into a slot."""

from __future__ import annotations

import logging
from typing import Protocol

from understudy.checkpoints.errors import CheckpointGoneError, UnsupportedFormatError
from understudy.checkpoints.taken import TakenCheckpoint
from understudy.evaluator.errors import EvaluatorError, LoadError
from understudy.evaluator.lifecycle.pool import NewSlot
from understudy.evaluator.lifecycle.servable import ModelSlot

_log = logging.getLogger(__name__)

_HOPELESS = (CheckpointGoneError, UnsupportedFormatError)


class SlotFactory(Protocol):
    """Makes slots. Used by the manager's thread only."""

    def build(self, taken: TakenCheckpoint) -> ModelSlot:
        """Make a slot that holds the model and weights of a checkpoint.

        Raises:
            LoadError: The checkpoint cannot be loaded.
            MemoryError: The devices have no room for another slot.
        """

    def architecture_of(self, taken: TakenCheckpoint) -> str:
        """Return the fingerprint that a slot built from it would have; raise LoadError if it has none."""


def load_into(room: ModelSlot | NewSlot, taken: TakenCheckpoint, *, slots: SlotFactory) -> ModelSlot:
    """Load and warm up a checkpoint in the slot given, or in a new one if that one does not fit.

    Args:
        room: A free slot, or leave to make one.
        taken: The checkpoint.
        slots: Makes slots.

    Raises:
        LoadError: It cannot be loaded. The slot given may be used for another checkpoint.
        MemoryError: The devices have no room for another slot.
    """
    architecture = slots.architecture_of(taken)
    if isinstance(room, NewSlot) or room.architecture != architecture or not _reload(room, taken):
        room = slots.build(taken)
    room.warm_up()
    return room


def _reload(slot: ModelSlot, taken: TakenCheckpoint) -> bool:
    """Load the weights into a slot of the same architecture; return False if they do not fit all the same."""
    try:
        slot.load(taken.model_file)
    except LoadError as error:
        _log.warning("the slot does not fit, a new one is built", extra={"step": taken.step, "reason": str(error)})
        return False
    return True


def is_hopeless(error: Exception) -> bool:
    """Return whether trying again cannot help."""
    return isinstance(error, _HOPELESS)


def as_evaluator_error(step: int, error: Exception) -> EvaluatorError:
    """Return the error as one that the caller may see."""
    if isinstance(error, EvaluatorError):
        return error
    text = str(error).strip().split("\n", maxsplit=1)[0] or type(error).__name__
    wrapped = LoadError(f"step {step} cannot be loaded: {text}")
    wrapped.__cause__ = error
    return wrapped
