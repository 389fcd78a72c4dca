"""What every version has computed so far, by the size of its batches, as the evaluator tells."""

from __future__ import annotations

import copy
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

REMEMBERED_STEPS = 64
"""How many versions are remembered: those that computed last."""


@dataclass(kw_only=True, slots=True)
class Times:
    """How often something happened, and how long it took in all."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float, *, count: int = 1) -> None:
        """Add what happened so often and took so long in all."""
        self.count += count
        self.seconds += seconds


@dataclass(kw_only=True, slots=True)
class StepStatistics:
    """What one version has computed for Predict, in whatever protocol it was asked.

    Attributes:
        examples: The examples, without padding.
        succeeded: The requests that were answered, from their arrival to the end of their batch.
        failed: The requests whose computation failed.
        queued: What the requests waited.
        computed: The requests, each with the whole time of its batch.
        batches: The batches by their number of examples.
        last_at: When the last batch ended, in seconds since the epoch; 0 if none did.
    """

    examples: int = 0
    succeeded: Times = field(default_factory=Times)
    failed: Times = field(default_factory=Times)
    queued: Times = field(default_factory=Times)
    computed: Times = field(default_factory=Times)
    batches: defaultdict[int, Times] = field(default_factory=lambda: defaultdict(Times))
    last_at: float = 0.0

    def add_batch(self, examples: int, queue_seconds: Sequence[float], compute_seconds: float) -> None:
        """Add one batch and the requests it was made of."""
        requests = len(queue_seconds)
        queued, computed = sum(queue_seconds), compute_seconds * requests
        self.examples += examples
        self.succeeded.add(queued + computed, count=requests)
        self.queued.add(queued, count=requests)
        self.computed.add(computed, count=requests)
        self.batches[examples].add(compute_seconds)


class InferenceStatistics:
    """Keeps the statistics of the versions that computed last. Thread-safe.

    Args:
        clock: Tells the time, in seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._steps: OrderedDict[int, StepStatistics] = OrderedDict()

    def of(self, step: int) -> StepStatistics:
        """Return what one version has computed until now."""
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
        """The computation of a Predict request failed, as long after its arrival as this."""
        with self._lock:
            self._touch(step).failed.add(seconds)

    def _touch(self, step: int) -> StepStatistics:
        statistics = self._steps.setdefault(step, StepStatistics())
        self._steps.move_to_end(step)
        if len(self._steps) > REMEMBERED_STEPS:
            self._steps.popitem(last=False)
        return statistics
