"""What waits for the devices, and which of it goes next."""

from __future__ import annotations

from collections import deque

from understudy.evaluator.compute.request_queue import EvaluateRequest, PredictQueue, PredictRequest, Request

MAX_PREDICTS_BEFORE_EVALUATE = 8
"""After so many Predict batches in a row, an Evaluate batch that waits is run."""


class BatchScheduler:
    """Predict goes before Evaluate, but not too often in a row. Not thread-safe.

    Args:
        max_batch_size: The most examples of one Predict batch.

    Attributes:
        predicts: The Predict requests that wait.
        evaluates: The batches of evaluations that wait, in the order they came.
    """

    def __init__(self, max_batch_size: int) -> None:
        self._max_batch_size = max_batch_size
        self.predicts = PredictQueue()
        self.evaluates: deque[EvaluateRequest] = deque()
        self._predicts_in_a_row = 0

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return bool(self.predicts or self.evaluates)

    def is_evaluate_next(self) -> bool:
        """Whether it is an evaluation's turn."""
        starved = self._predicts_in_a_row >= MAX_PREDICTS_BEFORE_EVALUATE
        return bool(self.evaluates) and (starved or not self.predicts)

    def next_predict_batch(self) -> list[PredictRequest]:
        """Take the next Predict batch, whose turn it is."""
        self._predicts_in_a_row += 1
        return self.extra_predict_batch()

    def extra_predict_batch(self) -> list[PredictRequest]:
        """Take a Predict batch, or nothing, while it is nobody's turn or an evaluation gives way."""
        return self.predicts.take_batch(self._max_batch_size)

    def next_predicts(self) -> list[PredictRequest]:
        """Return what `extra_predict_batch` would take."""
        return self.predicts.next_batch(self._max_batch_size)

    def next_evaluate(self) -> EvaluateRequest:
        """Take the next batch of an evaluation."""
        self._predicts_in_a_row = 0
        return self.evaluates.popleft()

    def drain(self) -> list[Request]:
        """Take whatever waits."""
        everything: list[Request] = [*self.predicts.remove(lambda _: True), *self.evaluates]
        self.evaluates.clear()
        return everything
