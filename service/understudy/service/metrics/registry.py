"""The registry of a service's metrics, its exposition, and histograms for frequent observations."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from math import inf

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


def new_registry() -> CollectorRegistry:
    """Return an empty registry.

    Turns off prometheus_client's ``_created`` series in this process: they would double the number of series, and
    Prometheus does not use them.
    """
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    return CollectorRegistry()


def exposition(registry: CollectorRegistry, accept: str = "") -> tuple[bytes, str]:
    """Return the exposition of every metric. Thread-safe.

    Args:
        registry: The registry of the metrics.
        accept: An HTTP Accept header; Prometheus' text format if it is empty, OpenMetrics if it accepts that.

    Returns:
        The exposition and its content type.
    """
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


class Tally:
    """The bucket counts and the sum of a histogram.

    Plain numbers, since prometheus_client's histogram takes two locks and scans the buckets for each value. One thread
    at a time may write; reading from another is safe.

    Args:
        bounds: The upper bounds of the buckets, ascending; an unbounded bucket is added.
    """

    __slots__ = ("_bounds", "_fell_into", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._fell_into = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._fell_into[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return the buckets for exposition: the number of values up to each bound."""
        bounds = map(floatToGoString, (*self._bounds, inf))
        return list(zip(bounds, map(float, accumulate(self._fell_into)), strict=True))


class TalliedHistogram(Collector):
    """A metric of one `Tally`, with the same thread-safety.

    Args:
        name: The metric's name.
        text: What it measures.
        bounds: The upper bounds of its buckets.
        registry: Where to register it.
    """

    def __init__(self, name: str, text: str, bounds: Sequence[float], registry: CollectorRegistry) -> None:
        self._name, self._text = name, text
        self._tally = Tally(bounds)
        self.observe = self._tally.observe
        registry.register(self)

    def observe_each(self, values: Iterable[float]) -> None:
        """Count several values."""
        observe = self.observe
        for value in values:
            observe(value)

    def collect(self) -> Iterator[Metric]:
        """Yield the current metric."""
        family = HistogramMetricFamily(self._name, self._text)
        family.add_metric([], self._tally.buckets(), self._tally.sum)
        yield family
