"""Measures how long an evaluation waits for its examples, and says what helps if that is much of its time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

from understudy.evaluator.datasets.dataset import EvaluationDataset
from understudy.evaluator.types import Batch

_log = logging.getLogger(__name__)

_TOO_MUCH = 0.4
_SHORTEST_SECONDS = 10.0


class InputWait:
    """Times the reading of one evaluation's batches. Not thread-safe.

    Reading counts as waiting while no batch is being computed.

    Args:
        clock: Monotonic clock, in seconds.

    Attributes:
        seconds: How long the evaluation has waited for its examples.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._idle_since: float | None = self._began
        self._has_first = False
        self.seconds = 0.0

    def timed(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches. The first is not counted, as it also opens files and traces graphs."""
        iterator = iter(batches)
        asked = self._clock()
        while (batch := next(iterator, None)) is not None:
            came = self._clock()
            if self._has_first and self._idle_since is not None:
                self.seconds += came - max(asked, self._idle_since)
            self._has_first = True
            yield batch
            asked = self._clock()

    def computing(self, batch: Future[Any]) -> None:
        """Count the time until a batch is done as that of the model."""
        self._idle_since = None

        def done(_: Future[Any]) -> None:
            self._idle_since = self._clock()

        batch.add_done_callback(done)

    def warn(self, dataset: EvaluationDataset) -> None:
        """Log what helps if the examples took much of the time so far."""
        total = self._clock() - self._began
        if total < _SHORTEST_SECONDS or self.seconds <= _TOO_MUCH * total:
            return
        _log.warning(
            "an evaluation waited for its examples: in the dataset's pipeline, give map() "
            "num_parallel_calls=tf.data.AUTOTUNE and end it with prefetch(); or store the examples as the model takes "
            "them, in an .npz file or with tf.data.Dataset.save",
            extra={"dataset": dataset.name, "seconds": total, "waited_seconds": self.seconds},
        )
