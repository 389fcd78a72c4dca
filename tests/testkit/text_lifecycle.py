"""Checkpoints that are a line of text, and slots that read them, so that tests control the timing of events.

The publisher, the source, the checkpoint store and the manager are the real ones.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from understudy.checkpoints import CheckpointPublisher, LocalCheckpoint, RunDir, RunSource, Signature, TensorSpec
from understudy.evaluator.evaluator_errors import LoadError
from understudy.evaluator.observer import LoadOutcome, SilentObserver
from understudy.evaluator.records.life_log import LifeLog
from understudy.evaluator.serving.checkpoint_store import CheckpointStore
from understudy.evaluator.serving.quarantine import Quarantine
from understudy.evaluator.serving.servable import Handle
from understudy.evaluator.serving.servable_manager import ServableManager
from understudy.evaluator.serving.version_monitor import VersionStateMonitor
from understudy.evaluator.types import Array, ArrayForm, Arrays, MetricSpec, VersionStatus

WAIT_SECONDS = 60.0
"""How long a test waits for an expected event; reached only if it fails."""

SIGNATURE = Signature(
    inputs=(TensorSpec(name="x", dtype="float32", shape=(None, 1)),),
    outputs=(TensorSpec(name="y", dtype="float32", shape=(None, 1)),),
)


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class TextSlot:
    """Answers with the number in the text: ``ARCHITECTURE NUMBER``."""

    def __init__(self, lifecycle: TextLifecycle, model_file: Path) -> None:
        self._lifecycle = lifecycle
        self.architecture = read(model_file)[0]
        self.loads = 0
        self.warm_ups = 0
        self.load(model_file)

    signature = SIGNATURE
    metric_digest = ""
    nested_outputs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def load(self, model_file: Path) -> bool:
        self._lifecycle.is_loading.set()
        self._lifecycle.may_load.wait(WAIT_SECONDS)
        self._lifecycle.complain()
        self.number = read(model_file)[1]
        self.loads += 1
        return False

    def warm_up(self) -> None:
        self.warm_ups += 1

    def check_inputs(self, inputs: Arrays) -> int:
        return len(inputs["x"])

    def check_forms(self, forms: Mapping[str, ArrayForm]) -> int:
        raise NotImplementedError(forms)

    def freeze(self, *, limit_mib: int, check_wanted: Callable[[], None]) -> int:
        raise NotImplementedError(limit_mib, check_wanted)

    def thaw(self) -> None:
        raise NotImplementedError

    @property
    def predict_note(self) -> str:
        raise NotImplementedError

    @property
    def output_tasks(self) -> Mapping[str, Any]:
        raise NotImplementedError

    def try_out(self) -> None:
        pass

    def keeping_variables(self) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    @property
    def may_overlap(self) -> bool:
        return True

    def launch(self, inputs: Arrays) -> Callable[[], dict[str, Array]]:
        result = self.forward(inputs)
        return lambda: result

    def forward(self, inputs: Arrays) -> dict[str, Array]:
        return {"y": np.full_like(inputs["x"], self.number)}

    def scorer(self, metrics: Sequence[MetricSpec], *, example_losses: bool = False, increments: bool = False) -> Any:
        raise NotImplementedError(metrics, example_losses, increments)

    scorer_of_outputs = scorer
    scores_whole: tuple[str, ...] = ()


def read(model_file: Path) -> tuple[str, int]:
    """Return the architecture and the number."""
    try:
        architecture, number = model_file.read_text().split()
        return architecture, int(number)
    except ValueError as error:
        raise LoadError(f"{model_file.name} is not a model") from error


class LoadLog(SilentObserver):
    """Records the outcomes of loads."""

    def __init__(self) -> None:
        self.outcomes: list[LoadOutcome] = []

    def checkpoint_loaded(self, outcome: LoadOutcome, *, seconds: float) -> None:
        assert seconds >= 0
        self.outcomes.append(outcome)


class TextLifecycle:
    """A run folder with a checkpoint store and a manager. Also the manager's slot factory."""

    def __init__(self, folder: Path, *, slots: int = 3, memory: int = 100) -> None:
        self.run = RunDir(folder / "run")
        self.publisher = CheckpointPublisher(self.run, keep=100)
        self.clock = Clock()
        self.observer = LoadLog()
        self.quarantine = Quarantine(attempts=3, retry_seconds=1.0, clock=self.clock)
        self.life = LifeLog(Path(":memory:"))
        self.store = CheckpointStore(RunSource(self.run), self.run.leases)
        self.version_monitor = VersionStateMonitor(
            quarantine=self.quarantine, observer=self.observer, life=self.life, is_offered=self.store.is_offered
        )
        self.promoted: list[int] = []
        self.on_promoted: Callable[[int], None] = lambda _step: None
        self.starved: queue.Queue[tuple[int, float, bool]] = queue.Queue()
        self.manager = ServableManager(
            store=self.store,
            slots=self,
            limit=slots,
            version_monitor=self.version_monitor,
            on_promoted=self._promoted,
            clock=self.clock,
            on_starved=lambda *came: self.starved.put(came),
        )
        self.is_loading = threading.Event()
        self.may_load = threading.Event()
        self.may_load.set()
        self.built: list[TextSlot] = []
        self.reclaimed = 0
        self.memory = memory
        self.out_of_memory_while_slots_exceed = 100
        self.load_fails_with: Exception | None = None

    def build(self, checkpoint: LocalCheckpoint) -> TextSlot:
        if len(self.built) >= self.memory:
            raise MemoryError
        slot = TextSlot(self, checkpoint.model_file)
        self.built.append(slot)
        return slot

    def architecture_of(self, checkpoint: LocalCheckpoint) -> str:
        return read(checkpoint.model_file)[0]

    def _promoted(self, step: int) -> None:
        self.promoted.append(step)
        self.on_promoted(step)

    def close(self) -> None:
        self.may_load.set()
        self.manager.close(WAIT_SECONDS)
        self.life.close()

    def complain(self) -> None:
        """Raise the scripted failure of a load."""
        if self.load_fails_with is not None:
            raise self.load_fails_with
        if len(self.manager._pool.servables) > self.out_of_memory_while_slots_exceed:
            raise MemoryError

    def reclaim(self) -> bool:
        self.reclaimed += 1
        return False

    def publish(self, *steps: int, text: str | None = None) -> None:
        """Publish checkpoints, and refresh the checkpoint store."""
        for step in steps:
            self.write(step, text)
        self.store.refresh()

    def write(self, step: int, text: str | None = None, *, final: bool = False) -> None:
        """Publish a checkpoint."""

        def write(folder: Path) -> None:
            (folder / "model.keras").write_text(text or f"net {step}")

        self.publisher.publish(step, write, epoch=None, final=final, metrics={}, signature=None)

    def promote(self, step: int) -> None:
        self.manager.promote(step).result(WAIT_SECONDS).release()

    def acquire(self, step: int) -> Handle:
        return self.manager.acquire(step).result(WAIT_SECONDS)

    def loaded(self) -> list[int]:
        return sorted(servable.step for servable in self.manager._pool.servables)

    def status(self, step: int) -> VersionStatus:
        return next(status for status in self.version_monitor.statuses(serving=None) if status.step == step)
