"""Faults of a cluster during evaluations: killed and stopped workers, nodes that leave and join.

A Ray cluster of one to four nodes runs on this machine. Many faults happen in each evaluation that is computed on it,
one after another at random places, each as soon as workers are ready that can do the work of the one which is lost. The
score must have the same bits as that of one process.
"""

from __future__ import annotations

import functools
import os
import pickle
import random
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from soak.trial import Trial
from testkit.checkpoints import Chief
from testkit.ray_cluster import ENVIRONMENT, RayCluster, running
from understudy.checkpoints.layout import RunDir
from understudy.checkpoints.local_checkpoint import open_local_checkpoint
from understudy.evaluator.sharding.evaluate import evaluate_files
from understudy.evaluator.sharding.work import DataSource, ModelSource, Work
from understudy.evaluator.types import EvaluationResult

FAULTS = 500
FAULTS_OF_AN_EVALUATION = 20
BATCH_SIZE = 24
STEP = 7
KINDS = ("kill", "stop", "remove", "join")

ALLOWED_SECONDS = {"kill": 3.0, "remove": 3.0, "stop": 10.0, "join": 3.0, "kill_last": 30.0}
"""How long an evaluation may stand still, on a machine that does nothing else. Where no other worker is ready, it waits
for a new one (``kill_last``), which imports TensorFlow."""

_SHARD_BATCHES = 2
_MOST_NODES = 4

_WINDOW_BATCHES = (2 * _MOST_NODES + 2) * _SHARD_BATCHES
"""The most batches that are computed and not scored yet: an evaluation stands still only after these."""

_FAULT_BATCHES = 3 * _WINDOW_BATCHES
"""The batches of each fault: it happens in the first third, and the evaluation must have stood still before the end."""

_READY_SECONDS = 180.0
_POLL_SECONDS = 0.01


class Fault(NamedTuple):
    """Something that happens, one of `KINDS`, so many batches after workers were ready, at most a window of them."""

    kind: str
    batches: int


class _Ready(NamedTuple):
    process: int
    node: str
    is_busy: bool


def examples_for(faults: int, batch_size: int = BATCH_SIZE) -> int:
    """Return the number of examples of an evaluation in which so many faults happen; its last batch is smaller."""
    return faults * _FAULT_BATCHES * batch_size - 5


@dataclass(kw_only=True)
class Faulty:
    """Evaluations on a cluster to which things happen. For one thread.

    Attributes:
        cluster: The cluster.
        work: What is evaluated.
        longest: The longest time that an evaluation stood still after each kind of fault, in seconds.
        late: Those that took longer than `ALLOWED_SECONDS`, with the nodes that were left and the machine's load.
        happened: How often each kind of fault happened; ``busy`` counts workers that were in the middle of a shard.
    """

    cluster: RayCluster
    work: Work
    longest: dict[str, float] = field(default_factory=dict)
    late: list[str] = field(default_factory=list)
    happened: Counter[str] = field(default_factory=Counter)
    _pool: Any = None
    _left: set[str] = field(default_factory=set)

    def score(self, faults: Sequence[Fault]) -> Mapping[str, float]:
        """Return the score of an evaluation of `examples_for` so many faults, in which they happen."""
        waits = range(1, 1 + len(faults) * _FAULT_BATCHES, _FAULT_BATCHES)
        kinds = {wait + fault.batches: fault.kind for wait, fault in zip(waits, faults, strict=True)}
        scored, since, standing = 0, 0.0, ""

        def progress(*_: object) -> None:
            nonlocal scored, since, standing
            scored += 1
            if standing:
                self._note(standing, time.monotonic() - since)
            if scored in waits:
                standing = ""
                self._await_workers()
            if scored in kinds:
                standing = self._happen(kinds[scored])
            since = time.monotonic()

        result = self.evaluate(progress)
        assert (result.examples, result.notes) == (examples_for(len(faults), self.work.batch_size), ())
        return result.metrics

    def evaluate(self, progress: Any, workers: int | None = None) -> EvaluationResult:
        """Return the result of an evaluation on so many nodes, all of them by default."""
        from understudy.evaluator.sharding.ray_pool import RayPool

        def make_pool(work: Work) -> Any:
            self._pool = RayPool(pickle.dumps(work), work.model.folder, address=self.cluster.address, workers=workers)
            return self._pool

        return evaluate_files(
            self.work, step=STEP, make_pool=make_pool, batches_per_shard=_SHARD_BATCHES, progress=progress
        )

    def _happen(self, kind: str) -> str:
        """Have a fault happen; return the name of its stall."""
        hit = None
        if kind == "join":
            self.cluster.join()
        elif kind == "remove":
            self.lose_node()
        else:
            hit = self._signal(signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        self.happened[kind] += 1
        return kind if any(worker.process != hit for worker in self._ready()) else f"{kind}_last"

    def lose_node(self) -> None:
        """Remove a node, if possible one whose worker is in the middle of a shard."""
        self._left.add(self.cluster.remove([worker.node for worker in self._ready()]))

    def _signal(self, number: signal.Signals) -> int:
        """Send a signal to a worker, if possible to one that is in the middle of a shard; return its process."""
        for worker in self._ready():
            with suppress(ProcessLookupError):
                os.kill(worker.process, number)
                self.happened["busy"] += worker.is_busy
                return worker.process
        raise AssertionError("no worker is ready")

    def _ready(self) -> Sequence[_Ready]:
        """Return the workers that have loaded the model and run, first those that are in the middle of a shard."""
        busy = {worker for worker, shard in [*self._pool._under_way.values()] if shard is not None}
        ready = [
            _Ready(actor.process, actor.node, worker in busy)
            for worker, actor in [*self._pool._workers.items()]
            if actor.process and actor.node not in self._left and _runs(actor.process)
        ]
        return sorted(ready, key=lambda each: not each.is_busy)

    def _await_workers(self) -> None:
        """Wait until two workers are ready, or the one of a single node."""
        until = time.monotonic() + _READY_SECONDS
        while len(self._ready()) < min(2, 1 + self.cluster.further_nodes):
            assert time.monotonic() < until, f"workers are not ready after {_READY_SECONDS:.0f} s"
            time.sleep(_POLL_SECONDS)

    def _note(self, kind: str, seconds: float) -> None:
        self.longest[kind] = max(self.longest.get(kind, 0.0), seconds)
        if seconds > ALLOWED_SECONDS[kind]:
            nodes, load = 1 + self.cluster.further_nodes, os.getloadavg()[0]
            self.late.append(f"{kind}: {seconds:.1f} s with {nodes} nodes at a load of {load:.1f}")


def _runs(process: int) -> bool:
    try:
        return psutil.Process(process).status() not in {psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE}
    except psutil.NoSuchProcess:
        return False


def make_work(folder: Path, *, examples: int, batch_size: int = BATCH_SIZE) -> Work:
    """Publish a convolutional net that takes about a millisecond for an example, and write a dataset for it."""
    import keras
    from keras import layers

    layer = [layers.Conv2D(filters, 3, activation="relu", padding="same") for filters in (32, 64, 64)]
    pooled = [layers.BatchNormalization(), layers.GlobalAveragePooling2D(), layers.Dense(10)]
    model = keras.Sequential([keras.Input((28, 28, 1)), *layer, *pooled])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(loss=loss, metrics=["accuracy"], weighted_metrics=["accuracy"])
    Chief(folder / "run").publish_other(STEP, model)
    published = RunDir(folder / "run").checkpoint(STEP)
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(examples, 28, 28, 1)).astype("f4"), rng.integers(0, 10, examples)
    weights = rng.uniform(0.5, 2.0, examples).astype("f4")
    np.savez(folder / "data.npz", allow_pickle=False, x=x, y=y, sample_weight=weights)
    return Work(
        model=ModelSource(folder=published, digest=open_local_checkpoint(published).digest),
        data=DataSource(name="data", paths=(folder / "data.npz",)),
        batch_size=batch_size,
    )


def draw(chance: random.Random, count: int, further_nodes: int) -> Sequence[Fault]:
    """Return what happens in an evaluation that begins with so many nodes besides the head."""
    faults = []
    for _ in range(count):
        kinds = ["kill", "stop", "remove", "join"]
        if further_nodes == 0:
            kinds = [
                "kill",
                "join",
            ]  # a single worker that hangs is found late, as nothing shows that it could be quicker
        elif further_nodes == _MOST_NODES - 1:
            kinds.remove("join")
        fault = Fault(chance.choice(kinds), chance.randrange(_WINDOW_BATCHES))
        further_nodes += {"remove": -1, "join": 1}.get(fault.kind, 0)
        faults.append(fault)
    return faults


def run(trial: Trial) -> None:
    """Let as many faults happen as requested. After an interruption the evaluation begins anew."""
    os.environ.update(ENVIRONMENT)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a node gives up if its agents take 30 s to start
    count = trial.count(FAULTS)
    state = trial.load_state() or {"done": 0, "happened": {}, "longest": {}, "late": [], "seconds": 0.0}
    done, seconds = state["done"], state["seconds"]

    @functools.cache
    def prepared(faults: int) -> tuple[Work, Mapping[str, float]]:
        work = make_work(trial.work / f"from-{state['done']}-{faults}", examples=examples_for(faults))
        return work, evaluate_files(work, step=STEP).metrics

    with running(2) as cluster:
        faulty = Faulty(
            cluster=cluster,
            work=prepared(min(FAULTS_OF_AN_EVALUATION, count))[0],
            longest=dict(state["longest"]),
            late=[*state["late"]],
            happened=Counter(state["happened"]),
        )
        while done < count:
            faults = draw(trial.chance(done), min(FAULTS_OF_AN_EVALUATION, count - done), cluster.further_nodes)
            faulty.work, expected = prepared(len(faults))
            began = time.monotonic()
            found = faulty.score(faults)
            done, seconds = done + len(faults), seconds + time.monotonic() - began
            held = found == expected
            trial.report(
                held=held,
                finished=done == count,
                faults={kind: faulty.happened[kind] for kind in KINDS},
                in_the_middle_of_a_shard=faulty.happened["busy"],
                late=faulty.late,
                longest_stalls_seconds={name: round(each, 2) for name, each in faulty.longest.items()},
                seconds_a_fault=round(seconds / done, 2),
            )
            if not held:
                raise AssertionError(f"{faults} until fault {done}: {found}, expected {expected}")
            facts = {"happened": dict(faulty.happened), "longest": faulty.longest, "late": faulty.late}
            trial.save_state({"done": done, "seconds": seconds, **facts})
    trial.finish()
