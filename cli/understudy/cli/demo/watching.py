"""Follows the evaluations of a service on a thread and prints them as they are recorded."""

from __future__ import annotations

import threading

from understudy.cli.demo.progress_printer import ProgressPrinter
from understudy.clients import Client, Evaluation
from understudy.clients.client_errors import UnderstudyError

_DECISIONS = frozenset({"accepted", "refused", "undecided"})


class EvaluationWatch:
    """Collects every evaluation that a service records.

    Args:
        target: The service, ``host:port``.
        printer: Receives each of them.
    """

    def __init__(self, target: str, printer: ProgressPrinter) -> None:
        self._client = Client(target)
        self._printer = printer
        self._changed = threading.Condition()
        self._seen: list[Evaluation] = []
        self._ended: UnderstudyError | None = None
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def wait_for(self, *, step: int, datasets: set[str], timeout_seconds: float) -> bool:
        """Wait until a step is recorded for all datasets; return whether it is."""
        with self._changed:
            return self._changed.wait_for(
                lambda: {seen.dataset for seen in self._seen if seen.step == step} >= datasets,
                timeout_seconds,
            )

    @property
    def scored_steps(self) -> list[int]:
        """The scored steps, ascending."""
        with self._changed:
            return sorted({seen.step for seen in self._seen if seen.outcome == "scored"})

    def close(self) -> None:
        """Stop following."""
        self._client.close()
        self._thread.join(timeout=30)

    def _run(self) -> None:
        try:
            for evaluation in self._client.watch_evaluations():
                self._take(evaluation)
        except UnderstudyError as error:
            self._ended = error

    def _take(self, evaluation: Evaluation) -> None:
        with self._changed:
            is_shown = evaluation.outcome not in _DECISIONS or self._is_first_undecided(evaluation)
            self._seen.append(evaluation)
            self._changed.notify_all()
        if not is_shown:
            return
        numbers = ", ".join(f"{name} {value:.4f}" for name, value in sorted(evaluation.metrics.items()))
        what = f"step {evaluation.step} on {evaluation.dataset}: {numbers or evaluation.reason}"
        if evaluation.outcome == "undecided":
            what = f"step {evaluation.step} is undecided, and served: {evaluation.reason}"
        self._printer.say("evaluator", what)

    def _is_first_undecided(self, evaluation: Evaluation) -> bool:
        return evaluation.outcome == "undecided" and all(seen.outcome != "undecided" for seen in self._seen)
