"""The requests for loaded checkpoints, and how a checkpoint is loaded into a slot."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from understudy.checkpoints.local_checkpoint import LocalCheckpoint
from understudy.devices.host import available_memory_bytes
from understudy.evaluator.evaluator_errors import EvaluatorError, LoadError, exhausted_resource
from understudy.evaluator.serving.servable import Handle, ModelSlot, Purpose
from understudy.evaluator.types import CheckpointInfo

_log = logging.getLogger(__name__)

_MEBIBYTE = 2**20


@dataclass(eq=False)
class LoadRequest:
    """A request for a handle on a checkpoint.

    ``deadline`` is on the manager's clock, ``since`` on the `time.monotonic` clock.
    """

    info: CheckpointInfo
    purpose: Purpose
    deadline: float | None
    future: Future[Handle] = field(default_factory=Future)
    since: float = field(default_factory=time.monotonic)

    def refuse(self, error: EvaluatorError) -> None:
        """Resolve the future with an error unless it was cancelled."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class LoadQueue(list[LoadRequest]):
    """Requests in the order of arrival. Not thread-safe: the manager guards it with its lock."""

    def remove_if(self, wanted: Callable[[LoadRequest], bool]) -> list[LoadRequest]:
        """Remove and return the requests for which ``wanted`` is true."""
        removed = [request for request in self if wanted(request)]
        self[:] = [request for request in self if request not in removed]
        return removed

    def heads(self) -> Iterator[LoadRequest]:
        """Yield the first request of each purpose: serving versions before on-demand versions."""
        for purpose in Purpose:
            head = next((request for request in self if request.purpose is purpose), None)
            if head is not None:
                yield head

    def next_deadline(self) -> float | None:
        """Return the earliest deadline, or None if there is none."""
        return min((request.deadline for request in self if request.deadline is not None), default=None)


class SlotFactory(Protocol):
    """Creates slots. Used only by the manager's thread."""

    def build(self, checkpoint: LocalCheckpoint) -> ModelSlot:
        """Create a slot that holds the model and weights of a checkpoint.

        Raises:
            LoadError: The checkpoint cannot be loaded. If the machine lacked a resource,
                `understudy.evaluator.evaluator_errors.exhausted_resource` returns it.
        """

    def architecture_of(self, checkpoint: LocalCheckpoint) -> str:
        """Return the architecture fingerprint of a checkpoint; raise LoadError if it has none."""

    def reclaim(self) -> bool:
        """Free the memory of dropped models; return whether the next call of every function will be slower."""


def reload(
    slot: ModelSlot, checkpoint: LocalCheckpoint, *, slots: SlotFactory, on_loaded: Callable[[], None]
) -> bool | None:
    """Load and warm up a checkpoint in a slot that holds another one; call back in between.

    Returns:
        Whether a model was dropped for it; None if it does not fit this slot, which is then not to be used again.

    Raises:
        LoadError: It cannot be loaded. The slot may be used for another checkpoint.
    """
    if slot.architecture != slots.architecture_of(checkpoint):
        return None
    try:
        dropped = slot.load(checkpoint.model_file)
    except LoadError as error:
        if exhausted_resource(error) is not None:
            raise
        _log.warning("the slot does not fit, a new one is built", extra={"step": checkpoint.step, "reason": str(error)})
        return None
    on_loaded()
    slot.warm_up()
    return dropped


def build(checkpoint: LocalCheckpoint, *, slots: SlotFactory, on_loaded: Callable[[], None]) -> ModelSlot:
    """Load and warm up a checkpoint in a new slot, and call back in between; raise LoadError if that fails."""
    _warn_if_too_large(checkpoint)
    slot = slots.build(checkpoint)
    on_loaded()
    slot.warm_up()
    return slot


def _warn_if_too_large(checkpoint: LocalCheckpoint) -> None:
    """Warn before a load that the system may end by killing this process, as nothing could be said afterwards.

    It is no more than a warning, because the files may hold an optimizer, which is not loaded.
    """
    size = sum(file.size_bytes for file in checkpoint.manifest.files if checkpoint.kind.owns(file.path))
    try:
        available = available_memory_bytes()
    except OSError:  # only Linux says it
        return
    if size > available:
        _log.warning(
            "the files of the checkpoint are larger than the memory that is available: if the system kills this "
            "process now, give it more memory",
            extra={"step": checkpoint.step, "files_mib": size // _MEBIBYTE, "available_mib": available // _MEBIBYTE},
        )


def forget_frames(error: BaseException) -> None:
    """Clear the frames of an error and of its causes, so that keeping the error does not keep models alive."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
