"""Puts a checkpoint into a slot."""

from __future__ import annotations

import logging
from typing import Protocol

from understudy.checkpoints.errors import CheckpointGoneError, UnsupportedFormatError
from understudy.checkpoints.taken import TakenCheckpoint
from understudy.evaluator.errors import EvaluatorError, LoadError
from understudy.evaluator.exhaustion import exhausted_resource
from understudy.evaluator.lifecycle.pool import NewSlot
from understudy.evaluator.lifecycle.servable import ModelSlot

_log = logging.getLogger(__name__)

_HOPELESS = (CheckpointGoneError, UnsupportedFormatError)


class SlotFactory(Protocol):
    """Makes slots. Used by the manager's thread only."""

    def build(self, taken: TakenCheckpoint) -> ModelSlot:
        """Make a slot that holds the model and weights of a checkpoint.

        Raises:
            LoadError: The checkpoint cannot be loaded; because of what the machine lacks if
                `understudy.evaluator.exhaustion.exhausted_resource` says so.
        """

    def architecture_of(self, taken: TakenCheckpoint) -> str:
        """Return the fingerprint that a slot built from it would have; raise LoadError if it has none."""

    def reclaim(self) -> bool:
        """Free what dropped models held; return whether the next call of every function will take longer."""


def load_into(room: ModelSlot | NewSlot, taken: TakenCheckpoint, *, slots: SlotFactory) -> tuple[ModelSlot, bool]:
    """Load and warm up a checkpoint in the slot given, or in a new one if that one does not fit.

    Args:
        room: A free slot, or leave to make one.
        taken: The checkpoint.
        slots: Makes slots.

    Returns:
        The slot that holds it, and whether a model was dropped for it.

    Raises:
        LoadError: It cannot be loaded. The slot given may be used for another checkpoint.
    """
    architecture = slots.architecture_of(taken)
    if not isinstance(room, NewSlot) and room.architecture == architecture:
        dropped = _reload(room, taken)
        if dropped is not None:
            room.warm_up()
            return room, dropped
    slot = slots.build(taken)
    slot.warm_up()
    return slot, not isinstance(room, NewSlot)


def _reload(slot: ModelSlot, taken: TakenCheckpoint) -> bool | None:
    """Load the weights into a slot of the same architecture; return None if they do not fit all the same."""
    try:
        return slot.load(taken.model_file)
    except LoadError as error:
        if exhausted_resource(error) is not None:
            raise
        _log.warning("the slot does not fit, a new one is built", extra={"step": taken.step, "reason": str(error)})
        return None


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


def forget_frames(error: BaseException) -> None:
    """Let go of the models that the frames of an error and of its causes hold; whoever keeps the error keeps these."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
