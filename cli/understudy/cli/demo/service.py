"""The demo's service, and what goes on beside it: predictions, and the events that are printed."""

from __future__ import annotations

import shutil
import sys
import threading
import time
import webbrowser
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import click
import numpy.typing as npt

from understudy.cli.demo.progress_printer import ProgressPrinter
from understudy.cli.processes import ChildProcess
from understudy.clients import Client, Evaluation
from understudy.clients.client_errors import UnderstudyError

LEAST_CHECKPOINTS = 3
_START_SECONDS = 60.0
_FIRST_CHECKPOINT_SECONDS = 120.0
_EVALUATION_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class DemoService:
    """A running ``understudy serve`` or ``run`` and its two addresses, ``host:port``."""

    process: ChildProcess
    target: str
    http_target: str

    @classmethod
    def once_listening(cls, process: ChildProcess, printer: ProgressPrinter) -> DemoService:
        """Wait until the process listens; raise click.ClickException if it does not."""
        found = process.wait_for_line(r"^LISTENING grpc=(\S+) http=(\S+)", timeout_seconds=_START_SECONDS)
        target, http_target = found.groups()
        printer.say(process.name, f"listens on {target} (gRPC) and {http_target} (HTTP), waits for a checkpoint")
        return cls(process=process, target=target, http_target=http_target)

    def announce_page(self, printer: ProgressPrinter, *, opens: bool) -> None:
        """Print the address of the page, and open it in the browser if requested."""
        url = f"http://{self.http_target}/"
        printer.say(self.process.name, f"shows what it does at {url}")
        if opens and not webbrowser.open(url):
            printer.say("demo", f"found no browser; open {url} in one")

    def print_next_steps(self, printer: ProgressPrinter, *, kept: bool) -> None:
        """Print the next commands to type."""
        printer.heading("The service is still running. Type next" if kept else "Type next")
        if kept:
            printer.text(f"  {_program()} status --target {self.target}")
            printer.text(f"  {_program()} watch --target {self.target}")
            printer.text(f"  http://{self.http_target}/ in a browser")
            printer.text(f"  curl http://{self.http_target}/metrics")
            printer.text(
                f"  kill {self.process.pid}        # it drains and ends; its files are beside {self.process.log}"
            )
        else:
            printer.text(f"  {_program()} demo --keep     the same, and the service stays for you to ask")
            printer.text(f"  {_program()} demo --script   a plain Keras script instead of our trainer")
            printer.text(f"  {_program()} --help          everything else")


def _program() -> str:
    """Return how to type this program: by its name, if the shell finds it so, else by its path."""
    own, found = Path(sys.argv[0]), shutil.which("understudy")
    is_script = own.name == "understudy" and own.is_file()
    return str(own) if is_script and (found is None or not own.samefile(found)) else "understudy"


class ServedTraining:
    """Follows the evaluations and keeps sending predictions from its entry to its exit.

    Args:
        service: The service that picks up the training's checkpoints.
        examples: The batch to predict, ``[batch, ...]``.
        printer: Receives the events.
    """

    def __init__(self, service: DemoService, examples: npt.NDArray[Any], printer: ProgressPrinter) -> None:
        self._service = service
        self._printer = printer
        self._traffic = Traffic(service.target, examples)
        self._watch = EvaluationWatch(service.target, printer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._traffic.stop()
        self._watch.close()

    def predict_from_now_on(self) -> None:
        """Wait for the first checkpoint to be served, and send predictions from then on."""
        self._service.process.wait_for_line("^READY ", timeout_seconds=_FIRST_CHECKPOINT_SECONDS)
        self._printer.say("client", "sends one prediction after the other from now on")
        self._traffic.start()

    def require_scored(self, *, step: int, datasets: set[str]) -> None:
        """Wait until a step is scored on all datasets; raise click.ClickException if it is not."""
        is_scored = self._watch.wait_for(step=step, datasets=datasets, timeout_seconds=_EVALUATION_SECONDS)
        if is_scored:
            return
        if self._watch.error is not None:
            raise self._service.process.failure(
                f"ended the stream of evaluations before step {step}: {self._watch.error}"
            )
        raise self._service.process.failure(f"had not scored step {step} after {_EVALUATION_SECONDS:.0f} s")

    def require_unbroken(self) -> None:
        """Raise click.ClickException if a prediction failed or too few checkpoints were scored and swapped in."""
        report, scored = self._traffic.report, self._watch.scored_steps
        steps = sorted(report.answered_by_step)
        self._printer.heading(f"{len(scored)} checkpoints were scored while predictions flowed")
        self._printer.text(
            f"  {report.answered} predictions were answered, by steps {', '.join(map(str, steps))}; "
            f"{len(report.failures)} failed; the slowest took {report.slowest_seconds * 1000:.0f} ms"
        )
        if report.failures:
            raise click.ClickException(f"a prediction failed: {report.failures[0]}")
        if min(len(scored), len(steps)) < LEAST_CHECKPOINTS:
            raise click.ClickException(f"fewer than {LEAST_CHECKPOINTS} checkpoints were scored and swapped in")


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

    def __init__(self, target: str, examples: npt.NDArray[Any], *, pause_seconds: float = 0.02) -> None:
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


_DECISIONS = frozenset({"accepted", "refused", "undecided"})


class EvaluationWatch:
    """Collects every evaluation that a service records.

    Args:
        target: The service, ``host:port``.
        printer: Receives each of them.

    Attributes:
        error: What ended the stream, if it was not closed.
    """

    def __init__(self, target: str, printer: ProgressPrinter) -> None:
        self.error: UnderstudyError | None = None
        self._client = Client(target)
        self._printer = printer
        self._changed = threading.Condition()
        self._seen: list[Evaluation] = []
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def wait_for(self, *, step: int, datasets: set[str], timeout_seconds: float) -> bool:
        """Wait until a step is recorded for all datasets or an error ends the stream; return whether it is recorded."""

        def is_recorded() -> bool:
            return {seen.dataset for seen in self._seen if seen.step == step} >= datasets

        with self._changed:
            self._changed.wait_for(lambda: is_recorded() or self.error is not None, timeout_seconds)
            return is_recorded()

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
            with self._changed:
                self.error = error
                self._changed.notify_all()

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
