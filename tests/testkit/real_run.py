"""A run folder with real Keras models, and an evaluator over it."""

from __future__ import annotations

import contextlib
import functools
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from understudy.checkpoints import CheckpointPublisher, RunDir, RunSource
from understudy.checkpoints.keras_signature import signature_of
from understudy.checkpoints.layout import MODEL_FILE
from understudy.checkpoints.signature import Signature
from understudy.evaluator.datasets.dataset import ArrayDataset, EvaluationDataset
from understudy.evaluator.evaluator import Evaluator
from understudy.evaluator.observer import FreezeOutcome, LoadOutcome, Milestone, SilentObserver
from understudy.evaluator.settings import EvaluatorSettings
from understudy.evaluator.types import Array, EvaluationOutcome, EvaluationRecord

WAIT_SECONDS = 100.0
"""How long a test waits for an expected event; reached only if it fails."""

FEATURES = 3
GOAL = 4.0
"""Step 4 matches the targets of the datasets; the loss grows with a step's distance from it."""


def step_model(step: float, *, features: int = FEATURES, outputs: int = FEATURES, deeper: bool = False) -> Any:
    """Return a compiled model whose every output is ``step * (1 + sum(x))``, optionally with one more layer."""
    x = keras.Input((features,), name="x")
    hidden = keras.layers.Rescaling(1.0)(x) if deeper else x
    y = keras.layers.Dense(outputs, name="y", kernel_initializer="zeros")(hidden)
    model = keras.Model(x, y)
    layer = model.get_layer("y")
    layer.set_weights([np.full((features, outputs), step, np.float32), np.full(outputs, step, np.float32)])
    model.compile(optimizer="sgd", loss="mse", metrics=[keras.metrics.MeanAbsoluteError(name="mae")])
    return model


def dataset(name: str = "test", *, rows: int = 10, goal: float = GOAL) -> ArrayDataset:
    return ArrayDataset(
        name, {"x": np.zeros((rows, FEATURES), np.float32), "y": np.full((rows, FEATURES), goal, np.float32)}
    )


class Told(SilentObserver):
    """Records its notifications."""

    def __init__(self) -> None:
        self.loads: list[LoadOutcome] = []
        self.records: list[EvaluationRecord] = []
        self.rejections: list[str] = []
        self.freezings: list[FreezeOutcome] = []
        self.milestones: list[Milestone] = []

    def checkpoint_loaded(self, outcome: LoadOutcome, *, seconds: float) -> None:
        assert seconds >= 0
        self.loads.append(outcome)

    def evaluation_recorded(self, record: EvaluationRecord) -> None:
        self.records.append(record)

    def rejected(self, reason: str) -> None:
        self.rejections.append(reason)

    def checkpoint_reached(self, milestone: Milestone, *, seconds: float) -> None:
        assert 0 <= seconds < WAIT_SECONDS
        self.milestones.append(milestone)

    def freezing_ended(self, outcome: FreezeOutcome, *, seconds: float) -> None:
        assert seconds >= 0
        self.freezings.append(outcome)


@functools.cache
def _saved(step: int, time: int) -> tuple[bytes, Signature]:
    """Return the file and the signature of the model of a step, which several tests publish."""
    del time
    return _save(step_model(step))


def _save(model: Any) -> tuple[bytes, Signature]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, MODEL_FILE)
        model.save(file)
        return file.read_bytes(), signature_of(model)


class RealRun:
    """Publishes models and opens evaluators on them."""

    def __init__(self, folder: Path) -> None:
        self.dir = RunDir(folder)
        self.publisher = CheckpointPublisher(self.dir, keep=1000)
        self.told = Told()
        self._times: Counter[int] = Counter()

    def publish(self, *steps: int, model: Any = None) -> None:
        """Publish a model, or that of each step, which makes another file where it is published again."""
        for step in steps:
            content, signature = _saved(step, self._times[step]) if model is None else _save(model)
            self._times[step] += 1

            def write(folder: Path, content: bytes = content) -> None:
                (folder / MODEL_FILE).write_bytes(content)

            self.publisher.publish(step, write, epoch=None, final=False, metrics={}, signature=signature)

    def evaluator(self, *, datasets: Sequence[EvaluationDataset] = (), **settings: Any) -> Evaluator:
        defaults: dict[str, Any] = {
            "state_dir": self.dir.evaluator,
            "devices": ("CPU:0", "CPU:1"),
            "poll_interval_seconds": 0.05,
            "load_retry_seconds": 0.01,
            "max_batch_size": 16,
        }
        return Evaluator(
            EvaluatorSettings(**(defaults | settings)),
            source=RunSource(self.dir),
            datasets=datasets,
            observer=self.told,
        )

    @contextlib.contextmanager
    def running(self, **settings: Any) -> Iterator[Evaluator]:
        """Yield an evaluator with a serving version."""
        with self.evaluator(**settings) as evaluator:
            assert evaluator.wait_ready(WAIT_SECONDS)
            yield evaluator
        assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("understudy")]


def rows(count: int = 1, value: float = 0.0) -> dict[str, Array]:
    return {"x": np.full((count, FEATURES), value, np.float32)}


def wait_for_records(evaluator: Evaluator, count: int) -> list[EvaluationRecord]:
    """Return the first ``count`` entries of the ledger as soon as they exist."""
    ends = time.monotonic() + WAIT_SECONDS
    while len(records := evaluator.ledger.page()) < count:
        assert time.monotonic() < ends, f"only {len(records)} of {count} entries came"
        time.sleep(0.01)
    return records


def until_served(evaluator: Evaluator, step: int) -> None:
    """Poll until a step is served."""
    ends = time.monotonic() + WAIT_SECONDS
    while evaluator.serving_step != step:
        assert time.monotonic() < ends, f"step {evaluator.serving_step} is served, not {step}"
        time.sleep(0.01)


def outcomes(records: Sequence[EvaluationRecord]) -> list[tuple[int, str, EvaluationOutcome]]:
    return [(record.step, record.dataset, record.outcome) for record in records]


def predicted_step(evaluator: Evaluator, **request: Any) -> int:
    return evaluator.predict(rows(), **request).result(WAIT_SECONDS).step
