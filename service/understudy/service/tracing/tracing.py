"""The traces of a service: what records them, from the settings and OpenTelemetry's variables."""

from __future__ import annotations

import os
from importlib import metadata
from typing import Final

from opentelemetry.sdk.environment_variables import OTEL_SDK_DISABLED
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Sampler
from opentelemetry.trace import Tracer
from prometheus_client import CollectorRegistry

from understudy.service.tracing.call_tracer import SpanCallTracer
from understudy.service.tracing.checkpoint_tracer import SpanCheckpointTracer
from understudy.service.tracing.sampling import DrawnIds, Sampling
from understudy.service.tracing.span_export import SpanExport

_UNNAMED: Final = "unknown_service"


class Tracing:
    """Records the traces of one service. It does not touch OpenTelemetry's global provider.

    Args:
        registry: Where to register the metric of the spans.
        share: The share of new traces to sample; see `Sampling`.
        endpoint: The base URL of the receiver; by default as OTEL_EXPORTER_OTLP_* say.

    Attributes:
        calls: Traces the calls.
        checkpoints: Traces the checkpoints, every one.

    Raises:
        SettingsError: A variable of OpenTelemetry cannot be used.
    """

    def __init__(self, registry: CollectorRegistry, *, share: float | None, endpoint: str | None) -> None:
        sampling = Sampling(share)
        self._export = SpanExport(registry, endpoint)
        self._resource = _resource()
        self.calls = SpanCallTracer(self._tracer(sampling.sampler), sampling)
        self.checkpoints = SpanCheckpointTracer(self._tracer(ALWAYS_ON))

    def close(self) -> None:
        """Send the spans that wait. Blocks for a bounded time; see `SpanExport`."""
        self._export.shutdown()

    def _tracer(self, sampler: Sampler | None) -> Tracer:
        provider = TracerProvider(
            sampler=sampler, resource=self._resource, shutdown_on_exit=False, id_generator=DrawnIds()
        )
        provider.add_span_processor(self._export)
        return provider.get_tracer("understudy", metadata.version("understudy"))


def is_disabled() -> bool:
    """Return whether OpenTelemetry's own variable turns all of it off."""
    return os.environ.get(OTEL_SDK_DISABLED, "").strip().lower() == "true"


def _resource() -> Resource:
    """Return the resource of the environment, with a name for a service that has none."""
    found = Resource.create()
    if not str(found.attributes[SERVICE_NAME]).startswith(_UNNAMED):
        return found
    return found.merge(Resource({SERVICE_NAME: "understudy"}))
