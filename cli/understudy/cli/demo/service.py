"""The demo's service, and the observation of it while training publishes checkpoints."""

from __future__ import annotations

import webbrowser
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import click
import numpy.typing as npt

from understudy.cli.demo.progress_printer import ProgressPrinter
from understudy.cli.demo.traffic import Traffic
from understudy.cli.demo.watching import EvaluationWatch
from understudy.cli.processes import ChildProcess

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
            printer.text(f"  .venv/bin/understudy status --target {self.target}")
            printer.text(f"  .venv/bin/understudy watch --target {self.target}")
            printer.text(f"  http://{self.http_target}/ in a browser")
            printer.text(f"  curl http://{self.http_target}/metrics")
            printer.text(
                f"  kill {self.process.pid}        # it drains and ends; its files are beside {self.process.log}"
            )
        else:
            printer.text("  make demo KEEP=1              the same, and the service stays for you to ask")
            printer.text("  make demo SCRIPT=1            a plain Keras script instead of our trainer")
            printer.text("  .venv/bin/understudy --help   everything else")


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
        if not self._watch.wait_for(step=step, datasets=datasets, timeout_seconds=_EVALUATION_SECONDS):
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
