"""Puts a checkpoint into a slot."""

from __future__ import annotations

from typing import Protocol

from understudy.checkpoints.errors import CheckpointGoneError, UnsupportedFormatError
from understudy.checkpoints.taken import TakenCheckpoint
from understudy.evaluator.errors import ArchitectureMismatchError, EvaluatorError, LoadError
from understudy.evaluator.lifecycle.pool import NewSlot
from understudy.evaluator.lifecycle.servable import ModelSlot

_HOPELESS = (ArchitectureMismatchError, CheckpointGoneError, UnsupportedFormatError)


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


def load_into(
    room: ModelSlot | NewSlot, taken: TakenCheckpoint, *, slots: SlotFactory, stage: ModelSlot | None
) -> ModelSlot:
    """Load and warm up a checkpoint in the slot given, or in a new one where there is none that fits.

    Args:
        room: A free slot, or leave to make one.
        taken: The checkpoint.
        slots: Makes slots.
        stage: The slot on stage, if any, whose architecture the checkpoint must have.

    Raises:
        ArchitectureMismatchError: It has another architecture.
        LoadError: It cannot be loaded. The slot given may be used for another checkpoint.
        MemoryError: The devices have no room for another slot.
    """
    architecture = slots.architecture_of(taken)
    if stage is not None and stage.architecture != architecture:
        raise ArchitectureMismatchError(
            f"the model of step {taken.step} differs from the one on stage in its architecture or compile "
            "configuration; publish it in a run folder of its own, or restart the evaluator to take it up"
        )
    if isinstance(room, NewSlot) or room.architecture != architecture:
        slot = slots.build(taken)
    else:
        slot = room
        slot.load(taken.model_file)
    slot.warm_up()
    return slot


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
