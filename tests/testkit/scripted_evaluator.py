"""A scripted evaluator: tests resolve its futures explicitly."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, cast

import numpy as np

from understudy.evaluator.evaluator import Evaluator
from understudy.evaluator.settings import EvaluatorSettings
from understudy.evaluator.types import Batch, EvaluationRecord, EvaluationResult, Prediction
from understudy.service.calls.metrics import InferenceStatistics
from understudy.service.handlers.inference_handler import InferenceHandler
from understudy.service.handlers.prediction_handler import Predictor
from understudy.service.readiness import Readiness
from understudy.service.served_model import ServedModel


class ScriptedLedger:
    """Entries in memory."""

    def __init__(self) -> None:
        self.entries: list[EvaluationRecord] = []

    @property
    def last_sequence(self) -> int:
        return max((entry.sequence for entry in self.entries), default=0)

    def page(self, *, after_sequence: int = 0, limit: int = 100, **filters: Any) -> list[EvaluationRecord]:
        wanted = {name: value for name, value in filters.items() if value is not None}
        dataset = wanted.get("dataset")
        beyond = [entry for entry in self.entries if entry.sequence > after_sequence]
        return [entry for entry in beyond if dataset in (None, entry.dataset)][:limit]


class ScriptedStream:
    """A stream whose batches are scored when a test says so."""

    def __init__(self) -> None:
        self.added: list[tuple[Batch, Future[None]]] = []
        self.arrived: asyncio.Queue[Future[None]] = asyncio.Queue()
        self.refusals: list[Exception] = []
        self.closed = asyncio.Event()

    def add(self, batch: Batch, deadline: float | None = None) -> Future[None]:
        del deadline
        if self.refusals:
            raise self.refusals.pop(0)
        future: Future[None] = Future()
        self.added.append((batch, future))
        self.arrived.put_nowait(future)
        return future

    def finish(self) -> EvaluationResult:
        return EvaluationResult(
            metrics={"loss": 0.5},
            examples=sum(batch.examples for batch, _ in self.added),
            batches=len(self.added),
            step=1,
            waiting_seconds=0.0,
            computing_seconds=0.0,
        )

    def close(self) -> None:
        self.closed.set()


class ScriptedEvaluator:
    """The part of the evaluator's interface that the tests need."""

    def __init__(self) -> None:
        self.predictions: asyncio.Queue[asyncio.Future[Prediction]] = asyncio.Queue()
        self.refusals: list[Exception] = []
        self.form_refusals: list[Exception] = []
        self.admission_refusals: list[Exception] = []
        self.admission_deadline: float | None = None
        self.forms: dict[str, Any] = {}
        self.opening: Future[ScriptedStream] = Future()
        self.opening_began = asyncio.Event()
        self.asked: dict[str, Any] = {}
        self.scoring: Future[EvaluationRecord] = Future()
        self.scoring_began = asyncio.Event()
        self.loop = asyncio.get_running_loop()
        self.ledger = ScriptedLedger()

    @property
    def as_evaluator(self) -> Evaluator:
        return cast("Evaluator", self)

    @property
    def as_model(self) -> ServedModel:
        return ServedModel(name="model", evaluator=self.as_evaluator)

    def predict_for(self, token: asyncio.Future[Prediction], sink: Any, inputs: Any, **asked: Any) -> None:
        del sink, asked["caller"], asked["dispatch"]
        self.asked = {"inputs": inputs, **asked}
        if self.refusals:
            raise self.refusals.pop(0)
        self.predictions.put_nowait(token)

    def check_admission(self, deadline: float | None, *, caller: Any) -> None:
        del caller
        self.admission_deadline = deadline
        if self.admission_refusals:
            raise self.admission_refusals.pop(0)

    def check_forms(self, forms: Any, **asked: Any) -> None:
        self.forms = {"forms": forms, **asked}
        if self.form_refusals:
            raise self.form_refusals.pop(0)

    def dispatch(self) -> None:
        pass

    def open_stream(self, **asked: Any) -> Future[ScriptedStream]:
        self.asked = asked
        self.opening_began.set()
        return self.opening

    def score_dataset(self, dataset: str, **asked: Any) -> Future[EvaluationRecord]:
        self.asked = {"dataset": dataset, **asked}
        self.loop.call_soon_threadsafe(self.scoring_began.set)
        return self.scoring


def inference_handler(evaluator: ScriptedEvaluator, readiness: Readiness, executor: Executor) -> InferenceHandler:
    """Return the Open Inference Protocol's handler over the evaluator, for streams of two requests."""
    return InferenceHandler(
        evaluator.as_model,
        Predictor(evaluator.as_evaluator),
        settings=EvaluatorSettings(state_dir=Path()),
        statistics=InferenceStatistics(),
        readiness=readiness,
        stream_depth=2,
        executor=executor,
    )


def prediction(step: int) -> Prediction:
    return Prediction(outputs={"y": np.full((1, 1), step, np.float32)}, step=step)
