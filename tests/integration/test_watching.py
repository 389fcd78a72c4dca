"""Following evaluations over the sudden death of the service, and what is left of them on disk."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
from tensorboard.util import tensor_util

from testkit.checkpoints import Chief, write_dataset
from testkit.in_process import WAIT_SECONDS, until
from testkit.preloading import preloaded
from understudy.clients import Client, Evaluation

DATASETS = ("one", "two")
BEFORE, AFTER = (10, 20, 30), (40, 50, 60)


class Watcher:
    """Follows so many evaluations on a thread of its own, whatever becomes of the service."""

    def __init__(self, target: str, *, after: int, count: int) -> None:
        self.seen: list[Evaluation] = []
        self._thread = threading.Thread(target=self._run, args=(target, after, count), name="watcher")
        self._thread.start()

    def _run(self, target: str, after: int, count: int) -> None:
        with Client(target) as client, closing(client.watch_evaluations(after=after)) as evaluations:
            for evaluation in itertools.islice(evaluations, count):
                self.seen.append(evaluation)

    def join(self) -> None:
        self._thread.join(WAIT_SECONDS)
        assert not self._thread.is_alive()


@contextmanager
def serve(run: Path, data: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    """Run the service as a process; kill it in the end."""
    datasets = ",".join(f"{name}={data}" for name in DATASETS)
    options = ["--run-dir", str(run), "--eval-data", datasets, "--grpc-port", str(port), "--http-port", "0"]
    options += ["--poll-interval-seconds", "0.05"]
    command = [sys.executable, "-m", "understudy.cli", "serve", *options]
    with subprocess.Popen(
        command,
        env={**os.environ, **preloaded()},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGKILL)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.timeout(600)
def test_a_watch_over_a_sudden_death_misses_and_repeats_nothing(tmp_path: Path) -> None:
    write_dataset(tmp_path / "test.npz", best_step=30)
    run, port = tmp_path / "run", free_port()
    chief = Chief(run)
    for step in BEFORE:
        chief.publish(step)
    target = f"127.0.0.1:{port}"
    total = len(DATASETS) * len(BEFORE + AFTER)
    watcher = Watcher(target, after=0, count=total)
    with serve(run, tmp_path / "test.npz", port):
        until(lambda: len(watcher.seen) >= 3)
    middle = watcher.seen[1].sequence
    for step in AFTER:
        chief.publish(step)
    with serve(run, tmp_path / "test.npz", port), Client(target, timeout_seconds=60) as client:
        late = Watcher(target, after=middle, count=total - middle)
        watcher.join()
        late.join()
        until(lambda: steps_shown(client) == dict.fromkeys(DATASETS, AFTER[-1]))
        gauges = gauges_of(client)

    assert [evaluation.sequence for evaluation in watcher.seen] == list(range(1, total + 1))
    assert late.seen == watcher.seen[middle:]
    scored = {(evaluation.dataset, evaluation.step): evaluation.metrics for evaluation in watcher.seen}
    assert set(scored) == {(dataset, step) for dataset in DATASETS for step in BEFORE + AFTER}
    for dataset in DATASETS:
        latest = [evaluation for evaluation in watcher.seen if evaluation.dataset == dataset][-1]
        for metric, value in latest.metrics.items():
            assert gauges["understudy_evaluation_metric", dataset, metric] == pytest.approx(value)
        assert summaries_of(run / "evaluator" / "tensorboard", dataset, "loss") == {
            step: pytest.approx(scored[dataset, step]["loss"]) for step in BEFORE + AFTER
        }


def steps_shown(client: Client) -> dict[str, float]:
    """Return the step that the gauges show of each dataset; they follow the ledger."""
    gauges = gauges_of(client)
    return {dataset: gauges["understudy_evaluation_step", dataset, ""] for dataset in DATASETS}


def gauges_of(client: Client) -> dict[tuple[str, str, str], float]:
    """Return the gauges of evaluations by name, dataset and metric."""
    families = text_string_to_metric_families(client.metrics())
    samples = [sample for family in families for sample in family.samples]
    return {
        (sample.name, sample.labels["dataset"], sample.labels.get("metric", "")): sample.value
        for sample in samples
        if sample.name.startswith("understudy_evaluation_") and "dataset" in sample.labels
    }


def summaries_of(folder: Path, run: str, tag: str) -> dict[int, float]:
    """Return what TensorBoard itself reads, by step; fail if a step is there twice."""
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(folder))
    multiplexer.Reload()
    assert set(multiplexer.Runs()) == set(DATASETS)
    events = multiplexer.Tensors(run, tag)
    found = {event.step: float(tensor_util.make_ndarray(event.tensor_proto)) for event in events}
    assert len(found) == len(events)
    return found
