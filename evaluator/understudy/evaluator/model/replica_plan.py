"""Decides which replicas a batch runs on, and how many examples each of them gets."""

from __future__ import annotations

import itertools
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Share:
    """The examples from ``start`` to ``stop`` of a batch, for one replica, padded to ``size`` examples."""

    replica: int
    start: int
    stop: int
    size: int


class ReplicaPlan:
    """Splits batches for the shortest expected duration. Thread-safe.

    One thread launches the work of all replicas, one after another. Each additional replica costs a launch and saves
    computing time on the others; both are measured. A batch that is faster on one replica than on several goes to one,
    in round-robin order.

    Args:
        replicas: The number of replicas.
        max_batch_size: The maximum number of examples of one call on one replica.

    Attributes:
        sizes: The numbers of examples of a call, ascending: powers of two, and ``max_batch_size``.
    """

    def __init__(self, replicas: int, max_batch_size: int) -> None:
        powers = [1 << exponent for exponent in range((max_batch_size - 1).bit_length())]
        self.sizes: tuple[int, ...] = (*powers, max_batch_size)
        self._replicas = replicas
        self._launch_seconds = 0.0
        self._seconds: dict[int, float] = {}
        self._scheduler = itertools.count()
        self._counts: dict[tuple[int, int], int] = {}

    def observe(self, size: int, *, launch_seconds: float, seconds: float) -> None:
        """Add the measured duration of a call on one replica, and of its launch alone."""
        known = self._launch_seconds
        self._launch_seconds = min(known, launch_seconds) if known else launch_seconds
        self._seconds[size] = seconds
        self._counts.clear()

    def size_for(self, examples: int) -> int:
        """Return the smallest size that holds this many examples."""
        return next(size for size in self.sizes if size >= examples)

    def most_examples(self, largest: int) -> int:
        """Return the number of examples of the largest batch whose shares have at most ``largest`` examples."""
        return self._replicas * largest

    def smaller_size(self, size: int) -> int:
        """Return the largest size that is at most half of this one; 0 if there is none."""
        return max((smaller for smaller in self.sizes if 2 * smaller <= size), default=0)

    def shares(self, examples: int, largest: int) -> list[Share]:
        """Split a batch of 1 to ``most_examples(largest)`` examples. No share is empty.

        Args:
            examples: The number of examples of the batch.
            largest: The maximum number of examples of a share; one of `sizes`.
        """
        count = self._count(examples, largest)
        first = next(self._scheduler) if count < self._replicas else 0
        bounds = itertools.pairwise(index * examples // count for index in range(count + 1))
        return [
            Share(replica=(first + index) % self._replicas, start=start, stop=stop, size=self.size_for(stop - start))
            for index, (start, stop) in enumerate(bounds)
        ]

    def largest_share(self, examples: int, largest: int) -> int:
        """Return the size of the largest share of a batch; see `shares`."""
        return self.size_for(-(-examples // self._count(examples, largest)))

    def _count(self, examples: int, largest: int) -> int:
        """Return the number of replicas for a batch."""
        count = self._counts.get((examples, largest))
        if count is None:
            count = self._counts[examples, largest] = self._best_count(examples, largest)
        return count

    def _best_count(self, examples: int, largest: int) -> int:
        """Return the number of replicas with the shortest expected duration; the maximum without measurements."""
        counts = [count for count in range(1, min(self._replicas, examples) + 1) if -(-examples // count) <= largest]
        return min(counts, key=lambda count: (self._estimate(examples, count), count)) if self._seconds else counts[-1]

    def _estimate(self, examples: int, count: int) -> float:
        size = self.size_for(-(-examples // count))
        longest = max(self._seconds.values())
        return (count - 1) * self._launch_seconds + self._seconds.get(size, longest)
