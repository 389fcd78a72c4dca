"""The main demo: two workers learn digits; the evaluator of their cluster scores and serves their checkpoints."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from understudy.checkpoints import MODEL_FILE, RunDir
from understudy.cli.demo import final_checks
from understudy.cli.demo.progress_printer import ProgressPrinter
from understudy.cli.demo.service import DemoService, ServedTraining
from understudy.cli.processes import ChildProcess, ProcessGroup
from understudy.clients import Client
from understudy.experiments.digits_data import load_split

WORKERS = 2
REPLICAS = 2
STEPS = 300
CHECKPOINT_EVERY = 30
_GATE = "test/accuracy not worse by 0.005 at 95%"
"""Less than two of the 300 test images, which are too few to decide it when one is newly wrong."""
_RUN = "run"
_DATASETS = {"validation", "test"}
_TRAINING_SECONDS = 120.0

Cluster = dict[str, list[str]]


def run_cluster_demo(folder: Path, *, keep: bool, opens: bool) -> None:
    """Run the demo in ``folder``, and leave the evaluator running and open its page if requested.

    Raises:
        click.ClickException: A check failed.
    """
    printer = ProgressPrinter()
    printer.heading(f"{WORKERS} training workers and an evaluator under one TF_CONFIG; files are in {folder}")
    cluster = _cluster()
    with ProcessGroup() as processes:
        evaluator = processes.add(_start_evaluator(folder, cluster))
        service = DemoService.once_listening(evaluator, printer)
        service.announce_page(printer, opens=opens)
        with ServedTraining(service, load_split("test").x[:8], printer) as served:
            workers = [processes.add(_start_worker(folder, index, cluster, printer)) for index in range(WORKERS)]
            served.predict_from_now_on()
            for worker in workers:
                worker.wait(timeout_seconds=_TRAINING_SECONDS)
            served.require_scored(step=STEPS, datasets=_DATASETS)
        served.require_unbroken()
        _finish(folder, service, printer)
        if keep:
            processes.release(evaluator)
        service.print_next_steps(printer, kept=keep)


def _cluster() -> Cluster:
    addresses = [f"127.0.0.1:{port}" for port in free_ports(WORKERS + 1)]
    return {"worker": addresses[:WORKERS], "evaluator": addresses[WORKERS:]}


def _start_evaluator(folder: Path, cluster: Cluster) -> ChildProcess:
    extra = ["--grpc-port", "0", "--http-port", "0", "--logical-cpus", str(REPLICAS)]
    extra += ["--gate", _GATE, "--when-undecided", "serve", "--tables"]
    return _start_task(folder, "evaluator", 0, cluster=cluster, extra=extra)


def _start_worker(folder: Path, index: int, cluster: Cluster, printer: ProgressPrinter) -> ChildProcess:
    def tell(line: str) -> None:
        if line.startswith("step "):
            printer.say("worker 0", line)

    return _start_task(folder, "worker", index, cluster=cluster, on_line=tell if index == 0 else None)


def _start_task(
    folder: Path,
    role: str,
    index: int,
    *,
    cluster: Cluster,
    extra: Sequence[str] = (),
    on_line: Callable[[str], None] | None = None,
) -> ChildProcess:
    command = ["-m", "understudy.cli", "run", "digits", "--run-dir", str(folder / _RUN)]
    command += ["--steps", str(STEPS), "--checkpoint-every", str(CHECKPOINT_EVERY)]
    command += ["--keep-checkpoints", str(STEPS // CHECKPOINT_EVERY), *extra]
    return ChildProcess(
        f"{role} {index}",
        command,
        log=folder / f"{role}-{index}.log",
        environment={"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})},
        on_line=on_line,
    )


def _finish(folder: Path, service: DemoService, printer: ProgressPrinter) -> None:
    test = load_split("test")
    model_file = RunDir(folder / _RUN).checkpoint(STEPS) / MODEL_FILE
    with Client(service.target) as client:
        expected = final_checks.evaluated_by_keras(model_file, test, folder=folder)
        result = final_checks.compare(client, test, expected=expected, step=STEPS, printer=printer)
        final_checks.require_accuracy(result)
        final_checks.scrape(service.http_target, printer)
        final_checks.draw_digits(client, test, printer)


def free_ports(count: int) -> list[int]:
    """Return ports on 127.0.0.1 that were free a moment ago, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
