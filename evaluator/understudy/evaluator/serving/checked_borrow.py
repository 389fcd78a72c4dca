"""Borrows a servable for inputs that were checked against an earlier one."""

from __future__ import annotations

from understudy.checkpoints.signature import TensorSpec
from understudy.evaluator.evaluator_errors import InvalidInputError, ModelChangedError
from understudy.evaluator.serving.servable import Handle
from understudy.evaluator.serving.servable_manager import ServableManager
from understudy.evaluator.types import Arrays


def borrow_checked(
    manager: ServableManager, step: int | None, inputs: Arrays, checked_step: int, checked_architecture: str
) -> Handle:
    """Borrow a loaded servable, checking the inputs again if it is of another architecture. Does not block.

    Args:
        manager: The manager to borrow from.
        step: Its step; None stands for the serving version.
        inputs: Every input by name, ``[examples, ...]``.
        checked_step: The step of the servable that the inputs were checked against.
        checked_architecture: The architecture of that servable.

    Raises:
        ModelChangedError: The inputs do not fit it.
        NotReadyError: Nothing is serving yet.
        VersionNotFoundError: The step is not loaded.
    """
    handle = manager.borrow(step)
    if handle.slot.architecture == checked_architecture:
        return handle
    try:
        handle.slot.check_inputs(inputs)
    except InvalidInputError as error:
        takes = ", ".join(map(_described, handle.slot.signature.inputs))
        handle.release()
        raise ModelChangedError(
            f"the serving model changed from step {checked_step} to step {handle.step} while the request waited, and "
            f"now takes {takes}: {error}"
        ) from error
    except BaseException:
        handle.release()
        raise
    return handle


def _described(spec: TensorSpec) -> str:
    lengths = ["examples", *("any" if length is None else str(length) for length in spec.shape[1:])]
    return f"{spec.name!r} {spec.dtype} [{', '.join(lengths)}]"
