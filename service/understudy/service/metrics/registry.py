"""The registry of a service's metrics, and its exposition."""

from __future__ import annotations

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder


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
