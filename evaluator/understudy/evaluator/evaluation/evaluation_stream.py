"""The evaluation of streams of batches, each on one checkpoint."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any, NamedTuple

from understudy.evaluator.batching.engine import Engine
from understudy.evaluator.evaluation.breakdown import Breakdown, BreakdownOptions, BrokenDown
from understudy.evaluator.evaluation.class_decisions import LabelNotes
from understudy.evaluator.evaluation.resample_memory import ResampleMemory
from understudy.evaluator.evaluation.servable_stream import ServableStream
from understudy.evaluator.evaluation.slices import Members
from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.evaluator.model.scorer import CheckedBatch, Scorer, ScoreState
from understudy.evaluator.serving.ranking import LOSS
from understudy.evaluator.serving.servable import Handle
from understudy.evaluator.types import Array, Arrays, Batch, EvaluationResult


class ExampleScores(NamedTuple):
    """What was computed for the examples of a batch.

    ``losses`` are float64 ``[examples]``, or None if the scorer computes none. ``outputs`` are the model's by name,
    each ``[examples, ...]``; empty unless the stream keeps them, or if there are none apart from the score.
    ``members`` says which slices the examples belong to, if the stream keeps outputs and has slices. ``masks`` say
    which elements of the outputs count, bool ``[examples, ...]``, for outputs that have a mask.
    """

    losses: Array | None
    outputs: Arrays
    members: Sequence[Members] = ()
    masks: Arrays = MappingProxyType({})


class EvaluationStream(ServableStream):
    """Scores batches, one after another, on the checkpoint of one handle, and finally releases it. Thread-safe.

    Its state is private and does not grow with the number of batches. A context manager that closes it.

    Args:
        handle: The checkpoint, borrowed for the duration of the stream.
        scorer: A scorer of the handle's slot.
        engine: Runs the batches.
        keep_outputs: Whether the futures of batches give the model's outputs, too.
        breakdown: What to compute besides the metrics of all examples; the scorer must compute increments for it.
        memory: Bounds the memory of its resamples with those of others; None if it is bounded alone.

    Raises:
        InvalidInputError: There are no slices and intervals for outputs that are nested as the model's are, and the
            breakdown is not lenient.
    """

    def __init__(
        self,
        handle: Handle,
        scorer: Scorer,
        engine: Engine,
        *,
        keep_outputs: bool = False,
        breakdown: BreakdownOptions | None = None,
        memory: ResampleMemory | None = None,
    ) -> None:
        super().__init__(handle, engine)
        self._scorer = scorer
        self._options = breakdown or BreakdownOptions()
        self._notes: tuple[str, ...] = ()
        if not self._options.is_empty and handle.slot.nested_outputs:
            self._notes = (_no_parts(handle.slot.nested_outputs),)
            if not self._options.lenient:
                raise InvalidInputError(*self._notes)
            self._options = BreakdownOptions()
        tasks = handle.slot.output_tasks
        self._label_notes = LabelNotes(tasks)
        self._breakdown: Breakdown | None = None
        if not self._options.is_empty:
            self._breakdown = Breakdown(self._options, tasks, memory=memory, between_pieces=self._between_pieces)
        self._with_members = keep_outputs
        self._keep_outputs = keep_outputs or self._options.needs_predictions
        self._state = scorer.start()
        self._waiting_seconds = 0.0
        self._computing_seconds = 0.0

    @property
    def without_example_losses(self) -> str:
        """Why there are no per-example losses although they were requested; known once a batch was scored."""
        with self._lock:
            return self._state.without_example_losses

    def add(self, batch: Batch, deadline: float | None = None) -> Future[ExampleScores]:
        """Queue a batch. Waiting for each future before adding the next batch keeps one batch in memory.

        Args:
            batch: Examples to score. Do not change it until the future is done.
            deadline: On the `time.monotonic` clock. If a batch misses it, the stream fails.

        Raises:
            InvalidInputError: The batch does not fit the model. The stream may continue.
            OverloadedError: Too many examples wait. The stream may continue.
            DeadlineExceededError: The deadline has passed.
            DrainingError: The evaluator is shutting down.
            CancelledError: The stream was closed. If it was closed with a reason, that error is raised instead.
        """
        checked = self._scorer.check(batch)
        added = time.monotonic()
        return self._run(
            lambda: self._score(checked, added),
            examples=batch.examples,
            deadline=deadline,
            prepare=lambda: self._scorer.prepare(checked),
            is_prepared=self._scorer.is_prepared(checked),
        )

    def stored(self) -> dict[str, Any] | None:
        """Return the state after the batches so far, for `restore`: plain values and arrays. Every future must be done.

        Returns:
            The state; None before the first batch, and while batches wait to be added to slices and resamples.
        """
        with self._lock:
            self._settle()
            if self._under_way or self._failure is not None or not self._state.batches:
                return None
            parts = None if self._breakdown is None else self._breakdown.stored()
            if parts is None and self._breakdown is not None:
                return None
            return {
                "score": self._state.stored(),
                "parts": parts,
                "labels": self._label_notes.stored(),
                "waiting_seconds": self._waiting_seconds,
                "computing_seconds": self._computing_seconds,
            }

    def restore(self, stored: Mapping[str, Any]) -> None:
        """Go on from what `stored` returned for a stream with the same scorer and options, before any batch.

        At least one batch must follow.
        """
        with self._lock:
            self._state = ScoreState.restored(stored["score"])
            self._label_notes.restore(stored["labels"])
            self._waiting_seconds = stored["waiting_seconds"]
            self._computing_seconds = stored["computing_seconds"]
            if self._breakdown is not None:
                self._breakdown.restore(stored["parts"])

    def finish(self) -> EvaluationResult:
        """Return the score of all batches. Every future of `add` must be done.

        Raises:
            InvalidInputError: There was no batch.
            EvaluatorError: The error of a failed batch, which the stream lacks, or the reason for which it was closed.
        """
        with self._lock:
            if self._closed:
                raise copy.copy(self._reason)
            self._settle()
            if self._under_way:
                raise RuntimeError(f"{len(self._under_way)} batches are under way; wait for their futures first")
            if self._failure is not None:
                raise self._failure
            state = self._state
        values, undefined = self._scorer.result(state), self._scorer.undefined(state)
        parts = BrokenDown() if self._breakdown is None else self._breakdown.finish()
        return EvaluationResult(
            metrics={name: value for name, value in values.items() if name not in undefined},
            examples=state.examples,
            batches=state.batches,
            step=self._handle.step,
            waiting_seconds=self._waiting_seconds,
            computing_seconds=self._computing_seconds,
            notes=(
                *(*self._handle.slot.notes, *self._notes, *self._label_notes.notes()),
                *(() if LOSS in undefined else _about_loss(values.get(LOSS, 0.0))),
                *parts.notes,
            ),
            intervals=parts.intervals,
            slices=parts.slices,
            resamples=self._options.resamples if parts.intervals else 0,
            confidence=self._options.confidence if parts.intervals else 0.0,
            resampled=parts.resampled,
            metric_digests=self._scorer.metric_digests(state, values),
            undefined=undefined,
        )

    def _score(self, checked: CheckedBatch, added: float) -> ExampleScores:
        began = time.monotonic()
        state = self._scorer.update(
            self._state, checked, between_pieces=self._between_pieces, keep_outputs=self._keep_outputs
        )
        self._label_notes.add(checked.labels.targets)
        with self._lock:
            self._state = state
            self._waiting_seconds += began - added
            self._computing_seconds += time.monotonic() - began
        return ExampleScores(state.example_losses, state.outputs, self._add_to_parts(checked.batch, state), state.masks)

    def _add_to_parts(self, batch: Batch, state: ScoreState) -> Sequence[Members]:
        """Add a batch to the slices and resamples, and return the slices of its examples if outputs are requested."""
        if self._breakdown is None or state.scored is None:
            return ()
        self._between_pieces()
        values = self._breakdown.add(batch, state.scored, state.outputs)
        return self._breakdown.members(values) if self._with_members else ()

    def _released(self) -> None:
        if self._breakdown is not None:
            self._breakdown.release()


def _about_loss(loss: float) -> tuple[str, ...]:
    """Return a sentence about a loss that is not finite."""
    if math.isfinite(loss):
        return ()
    what = "not a number, so that of all is none" if math.isnan(loss) else "infinite, so that of all is, too"
    where = "'understudy examples hardest' lists them for a dataset of a server with --tables"
    return (f"the loss of some examples is {what}; {where}",)


def _no_parts(nested: Sequence[str]) -> str:
    return (
        f"there are no slices and no intervals, because the model's outputs {list(nested)} are nested in a list or a "
        "dict within another; one tensor, or a list or a dict of tensors was expected"
    )
