"""The parts of a service that its settings turn on."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from importlib import metadata
from typing import TYPE_CHECKING

import structlog
from prometheus_client import CollectorRegistry

from understudy.evaluator.datasets.request_records import LoggedRequest
from understudy.evaluator.evaluation.class_decisions import decisions_as_targets
from understudy.evaluator.evaluation.drift_monitor import DriftMonitor
from understudy.evaluator.evaluator import Evaluator
from understudy.evaluator.records.outbox import evaluator_id
from understudy.evaluator.records.request_log import RequestLog
from understudy.evaluator.types import Arrays, OutputTask
from understudy.service.calls.caller import RefusalCounter
from understudy.service.calls.served_call import Guard
from understudy.service.events.deliveries import Deliveries, EventMetrics, RetryOptions
from understudy.service.events.exporter import ExporterContext
from understudy.service.events.webhook import Destinations, destinations_of
from understudy.service.fleet.evaluator_link import GrpcEvaluatorLink
from understudy.service.handlers.prediction_handler import PredictionSampler
from understudy.service.refreshed_files import RefreshedFiles, ReloadGauge, keep_refreshing
from understudy.service.served_model import ServedModel
from understudy.service.settings import ServeSettings
from understudy.service.tls import ServerCertificates
from understudy.service.traffic.traffic_sample import DriftMetrics, RequestLogMetrics, TrafficSample

if TYPE_CHECKING:
    from understudy.service.tracing.tracing import Tracing

SHADOW_REQUESTS = 64
"""How many requests may wait to be computed once more; they are dropped after a second anyway."""

_log = structlog.get_logger(__name__)


class Features:
    """Starts the parts that the settings turn on; each ends when the stack is closed. For the running event loop.

    Args:
        settings: The settings of the service.
        stack: Ends the parts, the last one first.
        registry: Where to register their metrics.
        executor: Runs what blocks.
    """

    def __init__(
        self, settings: ServeSettings, stack: AsyncExitStack, *, registry: CollectorRegistry, executor: Executor
    ) -> None:
        self._settings = settings
        self._stack = stack
        self._registry = registry
        self._executor = executor
        self._loop = asyncio.get_running_loop()
        self._refusals = RefusalCounter(registry)
        self._reloads = ReloadGauge(registry)

    def certificates(self) -> ServerCertificates | None:
        """Return the certificates for TLS, which are read again when they change."""
        files = self._settings.tls_files
        if files is None:
            return None
        certificates = ServerCertificates(files)
        self._keep_refreshing("certificates", certificates)
        return certificates

    async def guard(self) -> Guard | None:
        """Return the check of callers by their file, which is read again when it changes."""
        file = self._settings.callers
        if file is None:
            return None
        from understudy.service.callers.directory import CallerDirectory  # imports cryptography
        from understudy.service.callers.guard import CallerGuard

        directory = await self._loop.run_in_executor(self._executor, CallerDirectory, file)
        self._keep_refreshing("callers", directory)
        return CallerGuard(directory, self._refusals)

    async def tracing(self) -> Tracing | None:
        """Start to record traces."""
        settings = self._settings
        if not settings.tracing:
            return None
        from understudy.service.tracing.tracing import Tracing, is_disabled  # imports OpenTelemetry's SDK

        if is_disabled():
            _log.warning("no traces are recorded, as OTEL_SDK_DISABLED is true")
            return None
        start = functools.partial(
            Tracing, self._registry, share=settings.tracing_sample, endpoint=settings.tracing_endpoint
        )
        tracing = await self._loop.run_in_executor(self._executor, start)
        self._stack.push_async_callback(self._loop.run_in_executor, self._executor, tracing.close)
        return tracing

    def link(self, grpc_port: int) -> GrpcEvaluatorLink | None:
        """Return the connection to the evaluator that is followed at addresses, if there is one."""
        settings = self._settings.link(grpc_port)
        if settings is None:
            return None
        return GrpcEvaluatorLink(settings, software_version=metadata.version("understudy"))

    async def destinations(self) -> Destinations:
        """Return who receives events, with their code imported.

        Raises:
            SettingsError: The secret of the webhooks is missing or cannot be used, or there is no such exporter.
        """
        return await self._loop.run_in_executor(self._executor, destinations_of, self._settings)

    async def deliver(self, destinations: Destinations, model: ServedModel) -> None:
        """Deliver events."""
        settings, outbox = self._settings, model.evaluator.outbox
        metrics = EventMetrics(self._registry, destinations.exporters, outbox)
        if outbox is None:
            return
        identifier = await self._loop.run_in_executor(self._executor, evaluator_id, settings.evaluator_state_dir)
        context = ExporterContext(
            model_name=model.name, evaluator_id=identifier, checkpoint_uri=settings.location.checkpoint_uri
        )
        retry = RetryOptions(for_seconds=settings.event_retry_seconds)
        deliveries = Deliveries(outbox, destinations.makers(context), retry=retry, observer=metrics)
        deliveries.start()
        self._stack.push_async_callback(self._loop.run_in_executor, self._executor, deliveries.close)

    async def samplers(self, evaluator: Evaluator, link: GrpcEvaluatorLink | None) -> Sequence[PredictionSampler]:
        """Start what follows a sample of the predictions."""
        settings = self._settings
        samples = []
        if settings.request_log_options is not None:
            counts = RequestLogMetrics(self._registry)
            targets_of = _decisions_by(evaluator) if settings.request_log_targets == "classes" else None
            opening = functools.partial(RequestLog, settings.request_log_options, counts, targets_of=targets_of)
            log = await self._loop.run_in_executor(self._executor, opening)
            samples.append(
                TrafficSample(
                    log, share=settings.request_log_sample, dropped=counts.dropped, name="understudy-request-log"
                )
            )
        if settings.drift_reference is not None:
            shown = DriftMetrics(self._registry)
            dataset = evaluator.dataset(settings.drift_reference)
            options = settings.drift_options(settings.evaluator_state_dir)
            monitor = DriftMonitor(evaluator, dataset, options, on_computed=shown.computed)
            samples.append(
                TrafficSample(monitor, share=settings.drift_sample, dropped=shown.dropped, name="understudy-drift")
            )
        if (shadow := evaluator.shadow) is not None:
            samples.append(
                TrafficSample(
                    shadow,
                    share=lambda: shadow.share,
                    dropped=shadow.dropped,
                    name="understudy-shadow",
                    max_requests=SHADOW_REQUESTS,
                )
            )
            if link is not None:
                link.use_shadow(shadow.report)
        for sample in samples:
            sample.start()
            self._stack.push_async_callback(self._loop.run_in_executor, self._executor, sample.close)
        return samples

    def refresh_keys(self, evaluator: Evaluator) -> None:
        """Read the accepted keys of signatures again when their files change."""
        if evaluator.accepted_keys is not None:
            self._keep_refreshing("signature_keys", evaluator.accepted_keys)

    def _keep_refreshing(self, name: str, files: RefreshedFiles) -> None:
        task = asyncio.create_task(keep_refreshing(name, files, self._reloads, self._executor))
        self._stack.push_async_callback(_cancelled, task)


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


def _decisions_by(evaluator: Evaluator) -> Callable[[LoggedRequest], Arrays]:
    """Return a function that says what the version that answered a request decided, as targets of its outputs."""

    @functools.lru_cache(maxsize=4)
    def tasks_of(step: int) -> Mapping[str, OutputTask]:
        return evaluator.metadata(step).output_tasks

    return lambda request: decisions_as_targets(tasks_of(request.step), request.outputs)
