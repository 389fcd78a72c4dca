"""The RPC of MetricsService."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor

from prometheus_client import CollectorRegistry

from understudy.service.calls.call import CallContext
from understudy.service.metrics.registry import exposition
from understudy.v1 import metrics_pb2


class MetricsHandler:
    """Returns the metrics.

    Args:
        registry: The registry of the metrics.
        executor: Runs blocking calls.
    """

    def __init__(self, registry: CollectorRegistry, *, executor: Executor) -> None:
        self._registry = registry
        self._executor = executor

    async def get_metrics(
        self, request: metrics_pb2.GetMetricsRequest, call: CallContext
    ) -> metrics_pb2.GetMetricsResponse:
        """Return what ``GET /metrics`` returns."""
        del request, call
        loop = asyncio.get_running_loop()
        content, content_type = await loop.run_in_executor(self._executor, exposition, self._registry)
        return metrics_pb2.GetMetricsResponse(exposition=content, content_type=content_type)
