"""Live drift: the inputs and outputs of a sample of requests against those of a reference dataset.

The reference's inputs are read once; its outputs are predicted again when the serving version changes. Live examples
are counted in two halves of a window, of which the older is dropped at a time.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from understudy.checkpoints.atomic import write_json
from understudy.evaluator.datasets.dataset import EvaluationDataset
from understudy.evaluator.datasets.request_records import LoggedRequest
from understudy.evaluator.evaluation.drift import DriftReport, DriftSketches
from understudy.evaluator.evaluator_errors import EvaluatorError
from understudy.evaluator.types import Arrays, ModelDescription, Prediction, Version

DRIFT_FILE: Final = "drift.json"
"""In the state folder: the latest live drift, with the distributions."""

COMPUTE_SECONDS: Final = 15.0
REFERENCE_EXAMPLES: Final = 10_000
"""How many examples of the reference are read."""
SCORED_EXAMPLES: Final = 2048
"""How many of them each serving version predicts."""
BATCH_SIZE: Final = 128
PREDICT_SECONDS: Final = 5.0

_log = logging.getLogger(__name__)


class PredictingModel(Protocol):
    """What predicts the reference's outputs; `understudy.evaluator.evaluator.Evaluator` is one."""

    @property
    def serving_step(self) -> int | None:
        """The serving step."""

    def metadata(self, version: Version = "serving") -> ModelDescription:
        """Describe a version."""

    def predict(self, inputs: Arrays, *, version: Version = "serving") -> Future[Prediction]:
        """Predict a batch."""


@dataclass(frozen=True, kw_only=True)
class DriftOptions:
    """What is compared.

    Attributes:
        file: Where to write the report.
        window_seconds: How long live examples count; half of it at least.
        max_features: The most features of the inputs, and the most of the outputs.
        without: The names of inputs to leave out.
    """

    file: Path
    window_seconds: float
    max_features: int
    without: Collection[str] = ()


@dataclass(frozen=True, kw_only=True)
class LiveDrift:
    """The drift of the live examples.

    Attributes:
        dataset: The reference's name.
        step: The step whose outputs are compared.
        examples: The live examples.
        computed_at: When, in seconds since the epoch.
        inputs: The drift of the inputs.
        scores: The drift of the outputs, and of their classes.
    """

    dataset: str
    step: int
    examples: int
    computed_at: float
    inputs: DriftReport
    scores: DriftReport


class _Half:
    """One half of the window."""

    def __init__(self, inputs: DriftSketches, scores: DriftSketches) -> None:
        self.inputs = inputs.like_this()
        self.scores = scores.like_this()
        self.examples = 0


class DriftMonitor:
    """Compares a sample of requests with a dataset. For one thread at a time.

    Args:
        model: Predicts the reference's outputs.
        dataset: The reference.
        options: What is compared.
        on_computed: Called with each result.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self,
        model: PredictingModel,
        dataset: EvaluationDataset,
        options: DriftOptions,
        *,
        on_computed: Callable[[LiveDrift], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._dataset = dataset
        self._options = options
        self._on_computed = on_computed
        self._clock = clock
        self._inputs: DriftSketches | None = None
        self._scores = DriftSketches()
        self._step: int | None = None
        self._halves: list[_Half] = []
        self._rotates_at = 0.0
        self._computes_at = 0.0
        self._refers_at = 0.0
        self._is_new = False
        self._told = ""

    def take(self, request: LoggedRequest) -> None:
        """Count a request. Those before the reference is there do not count, nor do outputs of other versions."""
        if not self._halves:
            return
        half = self._halves[0]
        inputs = self._compared(request.inputs)
        half.inputs.add("input", inputs)
        half.examples += len(next(iter(request.inputs.values())))
        if request.step == self._step:
            half.scores.add_scores(request.outputs, {})
        self._is_new = True

    def tick(self) -> None:
        """Follow the serving version, and compute the drift once in a while."""
        now = self._clock()
        if not self._is_ready():
            return
        if now >= self._rotates_at:
            self._rotates_at = now + self._options.window_seconds / 2
            self._start_half()
        if self._is_new and now >= self._computes_at:
            self._computes_at = now + COMPUTE_SECONDS
            self._is_new = False
            self._compute()

    def close(self) -> None:
        """Free the sketches, whose library reports those that live until the process ends."""
        self._halves, self._inputs, self._scores = [], None, DriftSketches()

    def _compared(self, inputs: Arrays) -> Arrays:
        return {name: array for name, array in inputs.items() if name not in self._options.without}

    def _is_ready(self) -> bool:
        """Read and predict the reference as far as it is missing; return whether it is there."""
        step = self._model.serving_step
        now = self._clock()
        if step is None or step == self._step or now < self._refers_at:
            return self._step is not None
        self._refers_at = now + COMPUTE_SECONDS  # unless it succeeds
        try:
            self._refer_to(step)
            self._refers_at = self._computes_at = now
        except (EvaluatorError, TimeoutError) as error:  # too busy, or the version has changed again
            if str(error) != self._told:
                self._told = str(error)
                _log.warning("the reference of drift is not computed yet: %s", error)
        return self._step is not None

    def _refer_to(self, step: int) -> None:
        described = self._model.metadata(step)
        inputs = DriftSketches(max_features=self._options.max_features) if self._inputs is None else None
        scores = DriftSketches(max_features=self._options.max_features)
        read = 0
        for batch in self._dataset.batches(described.signature, BATCH_SIZE):
            if inputs is not None:
                inputs.add("input", self._compared(batch.inputs))
            if read < SCORED_EXAMPLES:
                predicted = self._model.predict(batch.inputs, version=step).result(PREDICT_SECONDS)
                scores.add_scores(predicted.outputs, described.output_tasks)
            read += batch.examples
            if read >= (REFERENCE_EXAMPLES if inputs is not None else SCORED_EXAMPLES):
                break
        self._inputs = inputs or self._inputs
        self._scores, self._step = scores, step
        for half in self._halves:
            half.scores = scores.like_this()
        if not self._halves:
            self._start_half()

    def _start_half(self) -> None:
        assert self._inputs is not None  # noqa: S101 - set before any half
        self._halves = [_Half(self._inputs, self._scores), *self._halves[:1]]

    def _compute(self) -> None:
        assert self._inputs is not None  # noqa: S101 - as above
        assert self._step is not None  # noqa: S101 - as above
        inputs, scores = self._inputs.like_this(), self._scores.like_this()
        for half in self._halves:
            inputs.merge(half.inputs)
            scores.merge(half.scores)
        found = LiveDrift(
            dataset=self._dataset.name,
            step=self._step,
            examples=sum(half.examples for half in self._halves),
            computed_at=time.time(),
            inputs=self._inputs.compare(inputs),
            scores=self._scores.compare(scores),
        )
        self._on_computed(found)
        with suppress(OSError):  # a full disk; the metrics are there
            write_json(self._options.file, dataclasses.asdict(found))
