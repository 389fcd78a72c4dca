"""Keeps sending predictions while checkpoints are swapped."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from understudy.clients import Client
from understudy.clients.client_errors import UnderstudyError


@dataclass
class TrafficReport:
    """The results of the predictions: the number answered by each step, and the errors of the others."""

    answered_by_step: dict[int, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    slowest_seconds: float = 0.0

    @property
    def answered(self) -> int:
        """Number of answered predictions."""
        return sum(self.answered_by_step.values())


class Traffic:
    """Sends predictions one after the other on its own thread until it is stopped.

    Args:
        target: The service, ``host:port``.
        examples: The batch to send, ``[batch, ...]``.
        pause_seconds: Pause between two predictions, so that training gets its share of a small machine.

    Attributes:
        report: The results so far.
    """

    def __init__(self, target: str, examples: npt.NDArray[Any], *, pause_seconds: float = 0.005) -> None:
        self._target = target
        self._examples = examples
        self._pause_seconds = pause_seconds
        self._stop = threading.Event()
        self.report = TrafficReport()
        self._thread = threading.Thread(target=self._run, name="traffic", daemon=True)

    def start(self) -> None:
        """Start sending."""
        self._thread.start()

    def stop(self) -> None:
        """Stop; afterwards the report is complete."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=60)

    def _run(self) -> None:
        with Client(self._target) as client:
            while not self._stop.wait(self._pause_seconds):
                self._predict_once(client)

    def _predict_once(self, client: Client) -> None:
        started = time.perf_counter()
        try:
            step = client.predict(self._examples).step
        except UnderstudyError as error:
            self.report.failures.append(str(error))
            return
        self.report.answered_by_step[step] = self.report.answered_by_step.get(step, 0) + 1
        self.report.slowest_seconds = max(self.report.slowest_seconds, time.perf_counter() - started)
