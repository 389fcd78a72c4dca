"""The queues of work for the devices, and the choice of the next batch."""

from __future__ import annotations

from collections import deque

from understudy.evaluator.batching.request_queue import EvaluateRequest, PredictQueue, PredictRequest, Request

MAX_PREDICTS_BEFORE_EVALUATE = 8
"""After this many Predict batches in a row, a waiting Evaluate batch runs."""


class BatchScheduler:
    """Predict takes precedence over Evaluate, but not too often in a row. Not thread-safe.

    Args:
        max_batch_size: The maximum number of examples of one Predict batch.

    Attributes:
        predicts: The queued Predict requests.
        evaluates: The queued batches of evaluations, in the order of arrival.
    """

    def __init__(self, max_batch_size: int) -> None:
        self._max_batch_size = max_batch_size
        self.predicts = PredictQueue()
        self.evaluates: deque[EvaluateRequest] = deque()
        self._predicts_in_a_row = 0

    def __bool__(self) -> bool:
        """Whether anything is queued."""
        return bool(self.predicts or self.evaluates)

    def is_evaluate_next(self) -> bool:
        """Whether an evaluation is next."""
        starved = self._predicts_in_a_row >= MAX_PREDICTS_BEFORE_EVALUATE
        return bool(self.evaluates) and (starved or not self.predicts)

    def next_predict_batch(self) -> list[PredictRequest]:
        """Dequeue the next Predict batch in its turn."""
        self._predicts_in_a_row += 1
        return self.extra_predict_batch()

    def extra_predict_batch(self) -> list[PredictRequest]:
        """Dequeue a Predict batch out of turn, or nothing if none is queued."""
        return self.predicts.take_batch(self._max_batch_size)

    def next_predicts(self) -> list[PredictRequest]:
        """Return the batch that `extra_predict_batch` would dequeue."""
        return self.predicts.next_batch(self._max_batch_size)

    def next_evaluate(self) -> EvaluateRequest:
        """Dequeue the next batch of an evaluation."""
        self._predicts_in_a_row = 0
        return self.evaluates.popleft()

    def drain(self) -> list[Request]:
        """Dequeue everything."""
        everything: list[Request] = [*self.predicts.remove(lambda _: True), *self.evaluates]
        self.evaluates.clear()
        return everything
