"""Faults of a cluster during evaluations: killed and stopped workers, nodes that leave and join.

A Ray cluster of one to three nodes runs on this machine. One evaluation after another is computed on it, and in each of
them something happens at a random place. The score must have the same bits as that of one process.
"""

from __future__ import annotations

import os
import pickle
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from soak.trial import Trial
from testkit import sample_models
from testkit.checkpoints import Chief
from testkit.ray_cluster import ENVIRONMENT, RayCluster, running
from understudy.checkpoints.layout import RunDir
from understudy.checkpoints.local_checkpoint import open_local_checkpoint
from understudy.evaluator.sharding.evaluate import evaluate_files
from understudy.evaluator.sharding.work import DataSource, ModelSource, Work
from understudy.evaluator.types import EvaluationResult

FAULTS = 500
EXAMPLES = 203
BATCH_SIZE = 8
STEP = 7
KINDS = ("kill", "stop", "remove", "join")

ALLOWED_SECONDS = {"kill": 3.0, "remove": 3.0, "stop": 10.0, "join": 3.0}
"""How long an evaluation may stand still, on a machine that does nothing else and with a worker that is ready. Without
one it waits for a new one, which imports TensorFlow."""

_SHARD_BATCHES = 2
_MOST_NODES = 3


@dataclass(kw_only=True)
class Faulty:
    """Evaluations on a cluster to which things happen. For one thread.

    Attributes:
        cluster: The cluster.
        work: What is evaluated.
        longest: The longest time that an evaluation stood still after each kind of fault, in seconds.
        late: Those that took longer than `ALLOWED_SECONDS`, with the nodes that were left and the machine's load.
    """

    cluster: RayCluster
    work: Work
    longest: dict[str, float] = field(default_factory=dict)
    late: list[str] = field(default_factory=list)
    _pool: Any = None

    def score(self, happening: Mapping[int, str]) -> Mapping[str, float]:
        """Return the score of an evaluation.

        Args:
            happening: What happens to it, some of `KINDS`, by the number of batches that are scored before.
        """
        faults: dict[str, Callable[[], None]] = {
            "kill": lambda: self._signal(signal.SIGKILL),
            "stop": lambda: self._signal(signal.SIGSTOP),
            "remove": self.cluster.remove,
            "join": self.cluster.join,
        }
        scored: list[float] = []

        def progress(*_: object) -> None:
            scored.append(time.monotonic())
            if kind := happening.get(len(scored)):
                faults[kind]()
                scored[-1] = time.monotonic()

        result = self.evaluate(progress)
        ends = [*sorted(happening)[1:], len(scored)]
        for (batches, kind), end in zip(sorted(happening.items()), ends, strict=True):
            stall = float(np.diff(scored[batches - 1 : end]).max())
            self.longest[kind] = max(self.longest.get(kind, 0.0), stall)
            if stall > ALLOWED_SECONDS[kind]:
                nodes, load = 1 + self.cluster.further_nodes, os.getloadavg()[0]
                self.late.append(f"{kind}: {stall:.1f} s with {nodes} nodes at a load of {load:.1f}")
        assert (result.examples, result.notes) == (EXAMPLES, ())
        return result.metrics

    def evaluate(self, progress: Callable[..., None], workers: int | None = None) -> EvaluationResult:
        """Return the result of an evaluation on so many nodes, all of them by default."""
        from understudy.evaluator.sharding.ray_pool import RayPool

        def make_pool(work: Work) -> Any:
            self._pool = RayPool(pickle.dumps(work), work.model.folder, address=self.cluster.address, workers=workers)
            return self._pool

        return evaluate_files(
            self.work, step=STEP, make_pool=make_pool, batches_per_shard=_SHARD_BATCHES, progress=progress
        )

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to a worker that is ready."""
        os.kill(next(actor.process for actor in self._pool._workers.values() if actor.process), number)


def make_work(folder: Path) -> Work:
    """Publish an image classifier, and write a dataset for it."""
    Chief(folder / "run").publish_other(STEP, sample_models.image_classifier())
    published = RunDir(folder / "run").checkpoint(STEP)
    x, y, weights = sample_models.image_data(np.random.default_rng(3), EXAMPLES)
    np.savez(folder / "data.npz", allow_pickle=False, x=x, y=y, sample_weight=weights)
    return Work(
        model=ModelSource(folder=published, digest=open_local_checkpoint(published).digest),
        data=DataSource(name="data", paths=(folder / "data.npz",)),
        batch_size=BATCH_SIZE,
    )


def draw(chance: random.Random, further_nodes: int) -> tuple[str, int]:
    """Return what happens next and after how many batches, if the cluster has so many nodes besides its head."""
    kinds = [
        kind
        for kind in KINDS
        if not (kind == "remove" and further_nodes == 0) and not (kind == "join" and further_nodes == _MOST_NODES - 1)
    ]
    return chance.choice(kinds), chance.randrange(1, EXAMPLES // BATCH_SIZE - _SHARD_BATCHES)


def run(trial: Trial) -> None:
    """Let as many faults happen as requested."""
    os.environ.update(ENVIRONMENT)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a node gives up if its agents take 30 s to start
    count = trial.count(FAULTS)
    state = trial.load_state() or {"done": 0, "faults": {}, "longest": {}, "late": []}
    happened = Counter(state["faults"])
    work = make_work(trial.work / f"from-{state['done']}")
    expected = evaluate_files(work, step=STEP).metrics
    with running(2) as cluster:
        faulty = Faulty(cluster=cluster, work=work, longest=dict(state["longest"]), late=[*state["late"]])
        for number in range(state["done"], count):
            kind, at = draw(trial.chance(number), cluster.further_nodes)
            found = faulty.score({at: kind})
            happened[kind] += 1
            held = found == expected
            figures = {
                "faults": dict(happened),
                "late": faulty.late,
                "longest_stalls_seconds": {name: round(each, 2) for name, each in faulty.longest.items()},
            }
            trial.report(held=held, finished=number + 1 == count, **figures)
            if not held:
                raise AssertionError(f"fault {number}, {kind} after {at} batches: {found}, expected {expected}")
            trial.save_state(
                {"done": number + 1, "faults": dict(happened), "longest": faulty.longest, "late": faulty.late}
            )
    trial.finish()
