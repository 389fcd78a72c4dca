"""Inference statistics of every version, by batch size, from the evaluator's events."""

from __future__ import annotations

import copy
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

REMEMBERED_STEPS = 64
"""How many versions to keep: those that were used last."""


@dataclass(kw_only=True, slots=True)
class Times:
    """A number of events and their total duration."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float, *, count: int = 1) -> None:
        """Add a number of events and their total duration."""
        self.count += count
        self.seconds += seconds


@dataclass(kw_only=True, slots=True)
class StepStatistics:
    """The predictions of one version, over all protocols.

    Attributes:
        examples: The number of examples, without padding.
        succeeded: The successful requests, from arrival to the end of their batch.
        failed: The requests whose computation failed.
        queued: The waiting times of the requests.
        computed: The requests, each with the whole time of its batch.
        batches: The batches by their number of examples.
        last_at: When the last batch ended, in seconds since the epoch; 0 if none.
    """

    examples: int = 0
    succeeded: Times = field(default_factory=Times)
    failed: Times = field(default_factory=Times)
    queued: Times = field(default_factory=Times)
    computed: Times = field(default_factory=Times)
    batches: defaultdict[int, Times] = field(default_factory=lambda: defaultdict(Times))
    last_at: float = 0.0

    def add_batch(self, examples: int, queue_seconds: Sequence[float], compute_seconds: float) -> None:
        """Add one batch and its requests."""
        requests = len(queue_seconds)
        queued, computed = sum(queue_seconds), compute_seconds * requests
        self.examples += examples
        self.succeeded.add(queued + computed, count=requests)
        self.queued.add(queued, count=requests)
        self.computed.add(computed, count=requests)
        self.batches[examples].add(compute_seconds)


class InferenceStatistics:
    """Keeps the statistics of the versions that were used last. Thread-safe.

    Args:
        clock: Returns the time in seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._steps: OrderedDict[int, StepStatistics] = OrderedDict()

    def of(self, step: int) -> StepStatistics:
        """Return the current statistics of one version."""
        with self._lock:
            return copy.deepcopy(self._steps.get(step, StepStatistics()))

    def batch_computed(
        self, step: int, *, examples: int, queue_seconds: Sequence[float], compute_seconds: float
    ) -> None:
        """A batch of Predict left the device."""
        with self._lock:
            statistics = self._touch(step)
            statistics.add_batch(examples, queue_seconds, compute_seconds)
            statistics.last_at = self._clock()

    def request_failed(self, step: int, *, seconds: float) -> None:
        """The computation of a Predict request failed, so many seconds after its arrival."""
        with self._lock:
            self._touch(step).failed.add(seconds)

    def _touch(self, step: int) -> StepStatistics:
        statistics = self._steps.setdefault(step, StepStatistics())
        self._steps.move_to_end(step)
        if len(self._steps) > REMEMBERED_STEPS:
            self._steps.popitem(last=False)
        return statistics
