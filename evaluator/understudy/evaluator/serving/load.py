"""Loads a checkpoint into a slot."""

from __future__ import annotations

import logging
from typing import Protocol

from understudy.checkpoints.checkpoint_errors import CheckpointGoneError, UnsupportedFormatError
from understudy.checkpoints.local_checkpoint import LocalCheckpoint
from understudy.evaluator.evaluator_errors import EvaluatorError, LoadError
from understudy.evaluator.exhaustion import exhausted_resource
from understudy.evaluator.serving.servable import ModelSlot
from understudy.evaluator.serving.slot_pool import NewSlot

_log = logging.getLogger(__name__)

_PERMANENT = (CheckpointGoneError, UnsupportedFormatError)


class SlotFactory(Protocol):
    """Creates slots. Used only by the manager's thread."""

    def build(self, checkpoint: LocalCheckpoint) -> ModelSlot:
        """Create a slot that holds the model and weights of a checkpoint.

        Raises:
            LoadError: The checkpoint cannot be loaded. `understudy.evaluator.exhaustion.exhausted_resource` returns
                the resource if the machine lacked one.
        """

    def architecture_of(self, checkpoint: LocalCheckpoint) -> str:
        """Return the architecture fingerprint of a checkpoint; raise LoadError if it has none."""

    def reclaim(self) -> bool:
        """Free the memory of dropped models; return whether the next call of every function will be slower."""


def load_into(
    target: ModelSlot | NewSlot, checkpoint: LocalCheckpoint, *, slots: SlotFactory
) -> tuple[ModelSlot, bool]:
    """Load and warm up a checkpoint in the given slot, or in a new one if it does not fit.

    Args:
        target: A free slot, or permission to create one.
        checkpoint: The checkpoint.
        slots: Creates slots.

    Returns:
        The slot that holds it, and whether a model was dropped for it.

    Raises:
        LoadError: It cannot be loaded. The given slot may be used for another checkpoint.
    """
    architecture = slots.architecture_of(checkpoint)
    if not isinstance(target, NewSlot) and target.architecture == architecture:
        dropped = _reload(target, checkpoint)
        if dropped is not None:
            target.warm_up()
            return target, dropped
    slot = slots.build(checkpoint)
    slot.warm_up()
    return slot, not isinstance(target, NewSlot)


def _reload(slot: ModelSlot, checkpoint: LocalCheckpoint) -> bool | None:
    """Load the weights into a slot of the same architecture; return None if they do not fit nevertheless."""
    try:
        return slot.load(checkpoint.model_file)
    except LoadError as error:
        if exhausted_resource(error) is not None:
            raise
        _log.warning("the slot does not fit, a new one is built", extra={"step": checkpoint.step, "reason": str(error)})
        return None


def is_permanent(error: Exception) -> bool:
    """Return whether a retry cannot succeed."""
    return isinstance(error, _PERMANENT)


def as_evaluator_error(step: int, error: Exception) -> EvaluatorError:
    """Return the error as one that the caller may see."""
    if isinstance(error, EvaluatorError):
        return error
    text = str(error).strip().split("\n", maxsplit=1)[0] or type(error).__name__
    wrapped = LoadError(f"step {step} cannot be loaded: {text}")
    wrapped.__cause__ = error
    return wrapped


def forget_frames(error: BaseException) -> None:
    """Clear the frames of an error and of its causes, so that keeping the error does not keep models alive."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
