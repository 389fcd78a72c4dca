"""Runs requests that were taken off the queue, and answers them."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from understudy.evaluator.compute.pending import BorrowedHandle, EvaluateRequest, PredictRequest, Request, is_late, late
from understudy.evaluator.observer import Observer
from understudy.evaluator.types import Arrays, Prediction


class Runner:
    """Computes batches and resolves the futures of their requests. Whatever goes wrong goes into the futures.

    Args:
        observer: Told of each batch that was computed, and of requests that were dropped.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def begin(self, request: Request) -> bool:
        """Mark a request as running; return False, having dropped it, if nobody wants it any more."""
        if not request.future.set_running_or_notify_cancel():
            self._observer.rejected("cancelled")
            return False
        if is_late(request):
            self._observer.rejected("deadline")
            request.future.set_exception(late(request))
            return False
        return True

    def predict(self, requests: Sequence[PredictRequest], fill_seconds: float) -> None:
        """Borrow a handle, run the requests as one batch, and give each its rows."""
        batch = [request for request in requests if self.begin(request)]
        if not batch:
            return
        try:
            handle = batch[0].borrow()
        except Exception as error:  # noqa: BLE001 - it is recorded in every future
            for request in batch:
                request.future.set_exception(error)
            return
        try:
            self._compute(handle, batch, fill_seconds)
        finally:
            handle.release()

    def _compute(self, handle: BorrowedHandle, batch: Sequence[PredictRequest], fill_seconds: float) -> None:
        began = time.monotonic()
        try:
            outputs = handle.slot.forward(_merge(batch))
        except Exception as error:  # noqa: BLE001 - it is recorded in the future
            self._fail(handle, batch, error)
            return
        self._observer.batch_computed(
            "predict",
            rows=sum(request.rows for request in batch),
            queue_seconds=[began - request.arrived for request in batch],
            fill_seconds=fill_seconds,
            compute_seconds=time.monotonic() - began,
            step=handle.step,
        )
        start = 0
        for request in batch:
            rows = {name: array[start : start + request.rows] for name, array in outputs.items()}
            request.future.set_result(Prediction(outputs=rows, step=handle.step))
            start += request.rows

    def _fail(self, handle: BorrowedHandle, batch: Sequence[PredictRequest], error: Exception) -> None:
        """Run the requests of a batch that failed one by one, so that one caller's values cannot fail another's."""
        if len(batch) == 1:
            self._observer.request_failed(step=handle.step, seconds=time.monotonic() - batch[0].arrived)
            batch[0].future.set_exception(error)
            return
        for request in batch:
            self._compute(handle, [request], 0.0)

    def evaluate(self, request: EvaluateRequest) -> None:
        """Do the work of an evaluation."""
        if not self.begin(request):
            return
        began = time.monotonic()
        try:
            result = request.work()
        except Exception as error:  # noqa: BLE001 - it is recorded in the future
            request.future.set_exception(error)
            return
        self._observer.batch_computed(
            "evaluate",
            rows=request.rows,
            queue_seconds=[began - request.arrived],
            fill_seconds=0.0,
            compute_seconds=time.monotonic() - began,
        )
        request.future.set_result(result)


def _merge(batch: Sequence[PredictRequest]) -> Arrays:
    if len(batch) == 1:
        return batch[0].inputs
    return {name: np.concatenate([request.inputs[name] for request in batch]) for name in batch[0].inputs}
