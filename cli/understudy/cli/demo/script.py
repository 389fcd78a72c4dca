"""The script demo: a plain Keras ``fit`` with ``ModelCheckpoint``, and the service that scores and serves it."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

import understudy.experiments
from understudy.cli.demo import final_checks
from understudy.cli.demo.progress_printer import ProgressPrinter
from understudy.cli.demo.service import DemoService, ServedTraining
from understudy.cli.processes import ChildProcess, ProcessGroup
from understudy.clients import Client
from understudy.experiments.digits_data import load_split

EPOCHS = 8
_TRAINING_SECONDS = 120.0
_DISCOVERY_SECONDS = 30.0
_POLL_SECONDS = 0.1


def run_script_demo(folder: Path, *, keep: bool, opens: bool) -> None:
    """Run the demo in ``folder``, and leave the service running and open its page if requested.

    Raises:
        click.ClickException: A check failed.
    """
    printer = ProgressPrinter()
    script = Path(understudy.experiments.__file__).with_name("plain_keras_script.py")
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir()
    test = load_split("test")
    np.savez(folder / "test.npz", x=test.x, y=test.y)
    printer.heading(f"A plain Keras script, {script.name}, and the service beside it; files are in {folder}")
    with ProcessGroup() as processes:
        process = processes.add(_start_service(folder, checkpoints))
        service = DemoService.once_listening(process, printer)
        service.announce_page(printer, opens=opens)
        with ServedTraining(service, test.x[:8], printer) as served:
            training = processes.add(_start_script(folder, script, checkpoints, printer))
            served.predict_from_now_on()
            training.wait(timeout_seconds=_TRAINING_SECONDS)
            served.require_scored(step=_newest_step(service, len(list(checkpoints.iterdir()))), datasets={"test"})
        served.require_unbroken()
        with Client(service.target) as client:
            final_checks.scrape(service.http_target, printer)
            final_checks.draw_digits(client, test, printer)
        if keep:
            processes.release(process)
        service.print_next_steps(printer, kept=keep)


def _start_service(folder: Path, checkpoints: Path) -> ChildProcess:
    command = ["-m", "understudy.cli", "serve", "--checkpoints", str(checkpoints), "--logical-cpus", "2"]
    command += ["--eval-data", f"test={folder / 'test.npz'}", "--state-dir", str(folder / "state")]
    command += ["--grpc-port", "0", "--http-port", "0"]
    return ChildProcess("service", command, log=folder / "service.log")


def _start_script(folder: Path, script: Path, checkpoints: Path, printer: ProgressPrinter) -> ChildProcess:
    def tell(line: str) -> None:
        if "accuracy: " in line:
            printer.say("script", line)

    command = [str(script), str(checkpoints), str(EPOCHS)]
    return ChildProcess("script", command, log=folder / "script.log", on_line=tell)


def _newest_step(service: DemoService, written: int) -> int:
    """Wait until the service has found as many checkpoints as were written; return the newest step."""
    until = time.monotonic() + _DISCOVERY_SECONDS
    with Client(service.target) as client:
        while len(found := [checkpoint.step for checkpoint in client.checkpoints()]) < written:
            if time.monotonic() > until:
                raise service.process.failure(
                    f"had found {len(found)} of {written} checkpoints after {_DISCOVERY_SECONDS:.0f} s"
                )
            time.sleep(_POLL_SECONDS)
    return max(found)
