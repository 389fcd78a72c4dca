"""The registry that all metrics of one service live in, and how it is shown."""

from __future__ import annotations

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder


def new_registry() -> CollectorRegistry:
    """Return an empty registry.

    Turns off prometheus_client's ``_created`` series in this process: they would double the number of series, and
    Prometheus makes nothing of them.
    """
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    return CollectorRegistry()


def exposition(registry: CollectorRegistry, accept: str = "") -> tuple[bytes, str]:
    """Show every metric; thread-safe.

    Args:
        registry: Where the metrics are.
        accept: An HTTP Accept header; Prometheus' text format if it is empty, OpenMetrics if that is asked for.

    Returns:
        The exposition and its content type.
    """
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type
