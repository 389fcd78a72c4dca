"""Which replicas a batch runs on, and how many rows each of them gets."""

from __future__ import annotations

import itertools
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Share:
    """The rows from ``start`` to ``stop`` of a batch, for one replica, padded to ``size`` rows."""

    replica: int
    start: int
    stop: int
    size: int


class ReplicaPlan:
    """Shares batches out so that they are likely to be done soonest. Thread-safe.

    One thread launches the work of all replicas, one after another, so that each further replica costs a launch and
    saves what the rows it takes would have cost the others. Both were measured. A batch that one replica does sooner
    than several goes to one, each to the next in turn.

    Args:
        replicas: How many there are.
        max_rows: The most rows of one call on one replica.

    Attributes:
        sizes: The numbers of rows of a call, ascending: powers of two, and ``max_rows``.
    """

    def __init__(self, replicas: int, max_rows: int) -> None:
        powers = [1 << exponent for exponent in range((max_rows - 1).bit_length())]
        self.sizes: tuple[int, ...] = (*powers, max_rows)
        self.max_rows = replicas * max_rows
        self._replicas = replicas
        self._launch_seconds = 0.0
        self._seconds: dict[int, float] = {}
        self._turns = itertools.count()
        self._counts: dict[int, int] = {}

    def observe(self, size: int, *, launch_seconds: float, seconds: float) -> None:
        """Take into account how long a call of one replica took, and how long its launch alone."""
        known = self._launch_seconds
        self._launch_seconds = min(known, launch_seconds) if known else launch_seconds
        self._seconds[size] = seconds
        self._counts.clear()

    def size_for(self, rows: int) -> int:
        """Return the smallest size that holds so many rows."""
        return next(size for size in self.sizes if size >= rows)

    def shares(self, rows: int) -> list[Share]:
        """Share out a batch of 1 to ``max_rows`` rows. No share is empty."""
        count = self._counts.get(rows)
        if count is None:
            count = self._counts[rows] = self._best_count(rows)
        first = next(self._turns) if count < self._replicas else 0
        bounds = itertools.pairwise(index * rows // count for index in range(count + 1))
        return [
            Share(replica=(first + index) % self._replicas, start=start, stop=stop, size=self.size_for(stop - start))
            for index, (start, stop) in enumerate(bounds)
        ]

    def _best_count(self, rows: int) -> int:
        """Return how many replicas are likely to be done soonest; as many as can, while nothing was measured."""
        counts = [count for count in range(1, min(self._replicas, rows) + 1) if self._fits(rows, count)]
        return min(counts, key=lambda count: (self._estimate(rows, count), count)) if self._seconds else counts[-1]

    def _fits(self, rows: int, count: int) -> bool:
        return -(-rows // count) <= self.sizes[-1]

    def _estimate(self, rows: int, count: int) -> float:
        size = self.size_for(-(-rows // count))
        longest = max(self._seconds.values())
        return (count - 1) * self._launch_seconds + self._seconds.get(size, longest)
