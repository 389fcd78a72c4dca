"""Two nodes of one core each against one, by turns; how soon an evaluation goes on after a fault, or uses a new node.

On a machine that does other work the times are longer and the ratio is smaller: the result has the load.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from soak.cluster_faults import Faulty, make_work
from soak.trial import Trial
from testkit.ray_cluster import ENVIRONMENT, RayCluster, running

ROUNDS = 5
EXAMPLES = 24_576
BATCH_SIZE = 64
GOALS = {"two_nodes_to_one": 1.8, "kill": 3.0, "remove": 3.0, "stop": 10.0, "join": 15.0}
"""The least ratio; the longest stalls after faults of one of two workers, and until a new node is used, in seconds."""


@contextmanager
def one_core(number: int) -> Iterator[None]:
    """Have what is started meanwhile use one core alone."""
    all_cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {all_cores[number % len(all_cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, all_cores)


class Timed(Faulty):
    """Evaluations on a cluster that are timed once all their workers are ready."""

    def run(self, nodes: int, happening: Callable[[Timed], object] | None = None) -> list[float]:
        """Return when batches were scored with all workers ready, and nothing or something happening after a third."""
        times: list[float] = []

        def progress(*_: object) -> None:
            if times or len(self._ready()) >= nodes:
                times.append(time.monotonic())
            if happening is not None and len(times) == EXAMPLES // BATCH_SIZE // 3:
                happening(self)
                times[-1] = time.monotonic()

        self.evaluate(progress, workers=nodes)
        assert len(times) > EXAMPLES // BATCH_SIZE // 2, f"{nodes} workers were ready too late to be measured"
        return times

    def rate(self, nodes: int) -> float:
        """Return the examples per second."""
        times = self.run(nodes)
        return (len(times) - 1) * BATCH_SIZE / (times[-1] - times[0])

    def stall(self, happening: Callable[[Timed], object]) -> float:
        """Return the longest time without a scored batch after something has happened to one of two workers."""
        return float(np.diff(self.run(2, happening)[EXAMPLES // BATCH_SIZE // 3 - 1 :]).max())

    def first_use(self, join: Callable[[], None]) -> float:
        """Return the seconds after which a second worker is ready, whose node joins during an evaluation of one."""
        began: list[float] = []
        used: list[float] = []

        def progress(*_: object) -> None:
            if not began:
                join()
                began.append(time.monotonic())
            if not used and len(self._ready()) >= 2:
                used.append(time.monotonic())

        while not used:
            self.evaluate(progress)
        return used[0] - began[0]


def run(trial: Trial) -> None:
    """Measure so many rounds."""
    os.environ.update(ENVIRONMENT)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    work = make_work(trial.work, examples=EXAMPLES, batch_size=BATCH_SIZE)
    found: dict[str, list[float]] = {name: [] for name in ("one_node", "two_nodes", "kill", "stop", "remove", "join")}
    cores = os.sched_getaffinity(0)
    with one_core(0), running(1) as cluster:
        os.sched_setaffinity(0, cores)
        _join(cluster)
        timed = Timed(cluster=cluster, work=work)
        kinds: dict[str, Callable[[Timed], object]] = {
            "kill": lambda one: one._signal(signal.SIGKILL),
            "stop": lambda one: one._signal(signal.SIGSTOP),
            "remove": lambda one: one.lose_node(),
        }
        count = trial.count(ROUNDS)
        for number in range(count):
            found["one_node"].append(timed.rate(1))
            found["two_nodes"].append(timed.rate(2))
            for kind, happening in kinds.items():
                found[kind].append(timed.stall(happening))
                report(trial, found, finished=False)
            found["join"].append(timed.first_use(lambda: _join(cluster)))
            report(trial, found, finished=number + 1 == count)
    trial.finish()


def _join(cluster: RayCluster) -> None:
    with one_core(1):
        cluster.join()


def report(trial: Trial, found: dict[str, Any], *, finished: bool) -> None:
    """Write what was found so far; it holds if every goal is met."""
    ratio = statistics.median(two / one for one, two in zip(found["one_node"], found["two_nodes"], strict=True))
    missed = [f"two_nodes_to_one {ratio:.2f}"] if ratio < GOALS["two_nodes_to_one"] else []
    missed += [f"{kind} {max(found[kind]):.2f}" for kind in GOALS if found.get(kind) and max(found[kind]) > GOALS[kind]]
    figures = {name: [round(value, 2) for value in values] for name, values in found.items()}
    trial.report(
        held=not missed,
        finished=finished,
        two_nodes_to_one=round(ratio, 3),
        goals=GOALS,
        missed=missed,
        load=os.getloadavg()[0],
        **figures,
    )
