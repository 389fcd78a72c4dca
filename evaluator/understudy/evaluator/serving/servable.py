"""A checkpoint loaded into a slot, and its reference-counted handles."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from understudy.checkpoints.signature import Signature, TensorSpec
from understudy.evaluator.evaluator_errors import InvalidInputError, ModelChangedError, VersionNotFoundError
from understudy.evaluator.types import Array, Arrays, MetricSpec


class ModelSlot(Protocol):
    """One set of (mirrored) variables with its traced functions; see `understudy.evaluator.model.slot.Slot`."""

    @property
    def architecture(self) -> str:
        """The fingerprint of the model and its compile configuration."""

    @property
    def signature(self) -> Signature:
        """The names, dtypes and shapes of the inputs and outputs."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Why evaluations may differ from a single device's, or why they run on one replica."""

    def load(self, model_file: Path) -> bool:
        """Assign the file's weights to the variables; raise LoadError if that fails.

        Returns:
            Whether the previous model was dropped.
        """

    def warm_up(self) -> None:
        """Run every function with every kind of batch, so that no request is delayed by a first call."""

    def try_out(self) -> None:
        """Run one generated example on every replica; raise the runtime's errors."""

    def check_inputs(self, inputs: Arrays) -> int:
        """Return the number of examples; raise InvalidInputError if the inputs do not fit the signature."""

    def forward(self, inputs: Arrays) -> dict[str, Array]:
        """Run the model on ``[examples, ...]`` inputs and return its outputs, ``[examples, ...]`` each."""

    def launch(self, inputs: Arrays) -> Callable[[], dict[str, Array]]:
        """Launch the model; return a function that waits for the outputs."""

    def scorer(self, metrics: Sequence[MetricSpec], *, example_losses: bool = False) -> Any:
        """Return a scorer for these metrics, or for the compiled ones if empty.

        With ``example_losses``, it also computes the loss of each example, ``[examples]``.
        """


class Servable:
    """A checkpoint in a slot. Thread-safe.

    Handles are counted: the slot may be used for another checkpoint once the servable is retired and idle.

    Args:
        step: The training step, which is the version.
        digest: The SHA-256 that identifies the checkpoint's content.
        slot: The slot that it is loaded in.
        created_at: When the checkpoint was written, in seconds since the Unix epoch.
        on_idle: Called each time the last handle is released, on the releasing thread; must be quick.
    """

    def __init__(
        self,
        *,
        step: int,
        digest: str,
        slot: ModelSlot,
        created_at: float = 0.0,
        on_idle: Callable[[], None] | None = None,
    ) -> None:
        self.step = step
        self.digest = digest
        self.slot = slot
        self.created_at = created_at
        self._on_idle = on_idle
        self._idle = threading.Condition()
        self._handles = 0
        self._retired = False

    @property
    def handles(self) -> int:
        """The number of open handles."""
        with self._idle:
            return self._handles

    def borrow(self) -> Handle:
        """Return a handle; the caller must release it.

        Raises:
            VersionNotFoundError: The servable was retired.
        """
        with self._idle:
            if self._retired:
                raise VersionNotFoundError(f"version {self.step} is being unloaded; ask for a version that is loaded")
            self._handles += 1
        return Handle(self)

    def retire(self) -> None:
        """Refuse new handles. Open handles stay valid."""
        with self._idle:
            self._retired = True

    def retire_if_idle(self) -> bool:
        """Retire the servable unless a handle is open; return whether it is retired and idle now."""
        with self._idle:
            if self._handles == 0:
                self._retired = True
            return self._retired and self._handles == 0

    def wait_idle(self, timeout_seconds: float) -> bool:
        """Wait until no handle is open; return False on timeout."""
        with self._idle:
            return self._idle.wait_for(lambda: self._handles == 0, timeout_seconds)

    def _give_back(self) -> None:
        with self._idle:
            self._handles -= 1
            is_idle = self._handles == 0
            if is_idle:
                self._idle.notify_all()
        if is_idle and self._on_idle is not None:
            self._on_idle()


class Handle:
    """A counted borrow of a servable, which stays loaded while any handle is open. A context manager. Thread-safe."""

    def __init__(self, servable: Servable) -> None:
        self.servable = servable
        self._lock = threading.Lock()
        self._released = False

    @property
    def step(self) -> int:
        """The training step of the checkpoint."""
        return self.servable.step

    @property
    def slot(self) -> ModelSlot:
        """The slot that the checkpoint is loaded in. Do not use it after `release`."""
        return self.servable.slot

    def release(self) -> None:
        """Release the handle. Idempotent."""
        with self._lock:
            if self._released:
                return
            self._released = True
        self.servable._give_back()  # noqa: SLF001 - the two halves of one count

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


def borrow_checked(
    borrow: Callable[[int | None], Handle],
    step: int | None,
    inputs: Arrays,
    checked_step: int,
    checked_architecture: str,
) -> Handle:
    """Borrow a loaded servable, checking the inputs again if it is of another architecture. Does not block.

    Args:
        borrow: Borrows the servable of a step.
        step: The step; None stands for the serving version.
        inputs: Every input by name, ``[examples, ...]``.
        checked_step: The step of the servable that the inputs were checked against.
        checked_architecture: The architecture of that servable.

    Raises:
        ModelChangedError: The inputs do not fit it.
        NotReadyError: Nothing is serving yet.
        VersionNotFoundError: The step is not loaded.
    """
    handle = borrow(step)
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
