"""Starts and closes an evaluator."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

from understudy.checkpoints.checkpoint_errors import LockHeldError
from understudy.checkpoints.locks import DirectoryLock
from understudy.evaluator.assembly.evaluator_inputs import EvaluatorInputs
from understudy.evaluator.evaluator_errors import DrainingError, NotReadyError, exhausted_resource
from understudy.evaluator.serving.decision_file import DECISION_FILE, ServingDecision, decode_decision
from understudy.evaluator.succession import write_replaced
from understudy.evaluator.types import DeviceListener, DeviceState

if TYPE_CHECKING:
    from understudy.evaluator.assembly.components import Components

_log = logging.getLogger(__name__)

CLOSE_SECONDS = 30.0

_OWN_STATE_FOLDER = "give this one a state folder of its own with --state-dir (or UNDERSTUDY_STATE_DIR)"


class EvaluatorLifecycle:
    """Starts the components of an evaluator, and closes them. Thread-safe; a context manager that does both."""

    def __init__(self, inputs: EvaluatorInputs) -> None:
        self._inputs = inputs
        self._datasets = {dataset.name: dataset for dataset in inputs.datasets}
        self._ready = ReadySignal()
        self._device_listener: DeviceListener = lambda _state, _error: None
        self._stack = ExitStack()
        self._lock = DirectoryLock(inputs.settings.state_dir, alternative=_OWN_STATE_FOLDER)
        self._decision_file = inputs.settings.state_dir / DECISION_FILE
        self._replaced: ServingDecision | None = None
        self._owns = False
        self._running: Components | None = None
        self._open: Components | None = None  # until `close`, so that a Predict needs no call to look
        self._closing = False
        self._close_by = float("inf")

    def own_state_dir(self) -> str:
        """Lock the state folder before `start`, without waiting.

        Returns:
            Who uses it, if another evaluator does, or why its storage does not answer now; empty if it is locked now.

        Raises:
            OSError: It cannot be locked, for another reason.
        """
        if not self._owns:
            try:
                self._lock.acquire()
            except LockHeldError as error:
                self._note_replaced()
                return str(error)
            except OSError as error:
                if exhausted_resource(error) is None:
                    raise
                return f"the state folder cannot be locked now: {error}"
            self._owns = True
            self._succeed()
        return ""

    def _note_replaced(self) -> None:
        """Note whom this evaluator replaces if the run is deleted with the state folder, and trained anew."""
        with contextlib.suppress(OSError, ValueError):
            self._replaced = decode_decision(self._decision_file.read_bytes())

    def _succeed(self) -> None:
        """Have servers that follow go over to this one, if the state folder that another one used is gone."""
        decision = self._replaced
        if decision is not None and not self._decision_file.exists():
            write_replaced(self._decision_file.parent, [decision.evaluator_id, *decision.replaces])

    def start(self) -> None:
        """Lock the state folder, open the ledger, build the replicas and start to watch the source.

        TensorFlow cannot change its devices after its first operation. If user code, such as an experiment, runs
        before, build the strategy first, with the same settings; see `understudy.evaluator.assembly`.

        Raises:
            ConfigurationError: The settings contradict each other, or the monitored dataset does not exist.
            DeviceError: The devices are not available.
            LedgerError: The ledger cannot be read.
            understudy.checkpoints.checkpoint_errors.LockHeldError: Another evaluator uses the state folder.
        """
        from understudy.evaluator.assembly.components import start_components

        with ExitStack() as undo:
            if not self._owns:
                self._lock.acquire()
                self._owns = True
            undo.callback(self._disown)
            self._running = start_components(
                self._inputs,
                on_promoted=self._ready.set,
                on_device_state=self._notify_device_state,
                remaining_seconds=self._remaining_seconds,
                stack=undo,
            )
            self._stack = undo.pop_all()
        self._open = None if self._closing else self._running
        _log.info(
            "evaluator started",
            extra={"replicas": self._components.replicas, "devices": list(self._components.devices)},
        )

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> None:
        """Refuse new work, finish queued work, end all threads and unlock the state folder. Idempotent.

        Evaluations in progress are aborted; the next evaluator on the same state folder repeats them.

        Raises:
            TimeoutError: A thread did not end, or a handle was not released, in time. Everything else was closed.
        """
        self._closing, self._open = True, None
        self._close_by = time.monotonic() + timeout_seconds
        try:
            self._stack.close()
        finally:
            self._disown()

    def wait_ready(self, timeout_seconds: float) -> bool:
        """Wait until a servable is serving; return False on timeout."""
        return self._ready.wait(timeout_seconds)

    def on_ready(self, callback: Callable[[int], None]) -> None:
        """Call back once, with the step, when the first servable is serving; at once if one already is.

        The callback runs on a thread of the evaluator or on the calling thread, must be quick and must not raise.
        """
        self._ready.add_callback(callback)

    def on_device_state(self, listener: DeviceListener) -> None:
        """Call back when the devices begin to fail, when they recover, and when they fail permanently.

        Replaces the previous listener. It runs on a thread of the evaluator, must be quick and must not raise.
        """
        self._device_listener = listener

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _disown(self) -> None:
        self._owns = False
        self._lock.release()

    def _notify_device_state(self, state: DeviceState, error: str) -> None:
        self._device_listener(state, error)

    def _remaining_seconds(self) -> float:
        """Return how long a component may take to close."""
        return min(max(0.0, self._close_by - time.monotonic()), CLOSE_SECONDS)

    @property
    def _components(self) -> Components:
        if self._running is None:
            raise NotReadyError("the evaluator was not started")
        return self._running

    def _started_components(self) -> Components:
        if self._closing:
            raise DrainingError("the evaluator is shutting down and takes no new work; ask another one")
        return self._components


class ReadySignal:
    """Signals once that a servable is serving. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._step: int | None = None
        self._callbacks: list[Callable[[int], None]] = []

    def set(self, step: int) -> None:
        """Give the signal with the serving step. Later calls have no effect."""
        with self._changed:
            if self._step is not None:
                return
            self._step = step
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        for callback in callbacks:
            callback(step)

    def wait(self, timeout_seconds: float) -> bool:
        """Wait for the signal; return False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._step is not None, timeout_seconds)

    def add_callback(self, callback: Callable[[int], None]) -> None:
        """Call back with the step when the signal is given, or at once if it already was."""
        with self._changed:
            step = self._step
            if step is None:
                self._callbacks.append(callback)
        if step is not None:
            callback(step)
