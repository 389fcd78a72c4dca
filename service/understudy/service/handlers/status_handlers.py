"""The RPCs about the model and the server: ModelService, MetricsService and ``grpc.health.v1.Health``.

The servicer of grpcio-health-checking 1.81 drops a service's other watchers when one of them disconnects.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Iterable
from concurrent.futures import Executor, Future
from typing import Any

from grpc_health.v1 import health_pb2
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.evaluator.types import ServingChange
from understudy.service.calls.methods import CallContext
from understudy.service.calls.status import PermissionDeniedError, UnknownServiceError
from understudy.service.handlers import messages
from understudy.service.readiness import DRAIN_NOTICE_SECONDS, Readiness, ReadinessState
from understudy.service.served_model import ServedModel
from understudy.v1 import metrics_pb2, model_pb2


class ModelHandler:
    """Describes versions and changes which one is served. Belongs to the event loop's thread.

    Args:
        model: The served model, whose evaluator manages the versions.
        executor: Runs blocking calls.
        read_only: Whether to refuse every change.
        followed: The addresses or the state folder of the evaluator that decides instead; None if this one does.
    """

    def __init__(
        self, model: ServedModel, *, executor: Executor, read_only: bool = False, followed: str | None = None
    ) -> None:
        self._model = model
        self._evaluator = model.evaluator
        self._executor = executor
        self._read_only = read_only
        self._followed = followed

    async def get_model_metadata(
        self, request: model_pb2.GetModelMetadataRequest, call: CallContext
    ) -> model_pb2.GetModelMetadataResponse:
        """Describe one version."""
        del call
        self._model.check_optional_name(request.model_name)
        described = self._evaluator.metadata(messages.version(request.version))
        return model_pb2.GetModelMetadataResponse(
            model_name=self._model.name,
            step=described.step,
            inputs=[messages.tensor_spec(spec) for spec in described.signature.inputs],
            outputs=[messages.tensor_spec(spec) for spec in described.signature.outputs],
            replicas=described.replicas,
            devices=described.devices,
            datasets=described.datasets,
            notes=described.notes,
            output_tasks={name: messages.output_task(task) for name, task in described.output_tasks.items()},
        )

    async def get_model_status(
        self, request: model_pb2.GetModelStatusRequest, call: CallContext
    ) -> model_pb2.GetModelStatusResponse:
        """Return the state of every version."""
        del call
        self._model.check_optional_name(request.model_name)
        evaluator = self._evaluator
        return model_pb2.GetModelStatusResponse(
            model_name=self._model.name,
            versions=[messages.version_status(status) for status in evaluator.status()],
            serving_step=evaluator.serving_step,
            latest_step=evaluator.latest_step,
            best_step=evaluator.best_step,
            pinned_step=evaluator.pinned_step,
            problem=evaluator.source_problem,
        )

    async def list_checkpoints(
        self, request: model_pb2.ListCheckpointsRequest, call: CallContext
    ) -> model_pb2.ListCheckpointsResponse:
        """Return all checkpoints."""
        del call
        self._model.check_optional_name(request.model_name)
        found = await asyncio.get_running_loop().run_in_executor(self._executor, self._evaluator.checkpoints)
        return model_pb2.ListCheckpointsResponse(checkpoints=[messages.checkpoint(info) for info in found])

    def check_promotion(self, call: CallContext) -> None:
        """Raise PermissionDeniedError if nothing may change."""
        del call
        if self._followed is not None:
            raise PermissionDeniedError(
                f"this server serves what the evaluator at {self._followed} serves, so Promote is refused; call that "
                "evaluator"
            )
        if self._read_only:
            raise PermissionDeniedError(
                "this server is read-only, so Promote is refused; restart it without --read-only to change the version"
            )

    async def promote(self, request: model_pb2.PromoteRequest, call: CallContext) -> model_pb2.PromoteResponse:
        """Pin, remove the pin, or roll back."""
        decision = {"action": _action_name(request.action).lower(), "version": str(request.version).strip()}
        call.audited = decision
        self._model.check_optional_name(request.model_name)
        change = await asyncio.wrap_future(self._decide(request, call))
        call.audited = decision | dataclasses.asdict(change)
        return model_pb2.PromoteResponse(
            serving_step=change.serving_step, previous_step=change.previous_step, pinned_step=change.pinned_step
        )

    def _decide(self, request: model_pb2.PromoteRequest, call: CallContext) -> Future[ServingChange]:
        action, names_version = request.action, request.HasField("version")
        if action == model_pb2.PROMOTE_ACTION_PIN:
            if not names_version:
                raise InvalidInputError("action is PIN without a version; set version to a step or a label")
            return self._evaluator.pin(messages.version(request.version), deadline=call.deadline)
        if action not in (model_pb2.PROMOTE_ACTION_UNPIN, model_pb2.PROMOTE_ACTION_ROLL_BACK):
            raise InvalidInputError(f"action is {_action_name(action)}; give PIN, UNPIN or ROLL_BACK")
        if names_version:
            raise InvalidInputError(f"action is {_action_name(action)} with a version; only PIN takes one")
        if action == model_pb2.PROMOTE_ACTION_UNPIN:
            return self._evaluator.unpin(deadline=call.deadline)
        return self._evaluator.roll_back(deadline=call.deadline)


def _action_name(action: int) -> str:
    value = model_pb2.PromoteAction.DESCRIPTOR.values_by_number.get(action)
    return f"number {action}" if value is None else value.name.removeprefix("PROMOTE_ACTION_")


class HealthHandler:
    """Reports whether the server as a whole (``""``) and each of its services can serve calls.

    Args:
        readiness: The state that all of them share.
        services: Full names of the services.
    """

    def __init__(self, readiness: Readiness, services: Iterable[str]) -> None:
        self._readiness = readiness
        self._services = frozenset(services) | {""}

    async def check(self, request: health_pb2.HealthCheckRequest, call: CallContext) -> health_pb2.HealthCheckResponse:
        """Return a service's status; raise UnknownServiceError if there is no such service."""
        del call
        if request.service not in self._services:
            known = ", ".join(sorted(self._services - {""}))
            raise UnknownServiceError(f"no service {request.service!r} here; there are {known}")
        return health_pb2.HealthCheckResponse(status=self._status(request.service, self._readiness.state))

    async def list(self, request: Any, call: CallContext) -> Any:
        """Return the status of the server and of each service; grpcio-health-checking has this RPC from 1.85 on."""
        del request, call
        state = self._readiness.state
        return health_pb2.HealthListResponse(
            statuses={
                service: health_pb2.HealthCheckResponse(status=self._status(service, state))
                for service in sorted(self._services)
            }
        )

    async def watch(
        self, request: health_pb2.HealthCheckRequest, call: CallContext
    ) -> AsyncGenerator[health_pb2.HealthCheckResponse, None]:
        """Yield a service's status now and at each change, until the caller disconnects or the server drains."""
        del call
        last = None
        self._readiness.watchers += 1
        try:
            while True:
                changed = self._readiness.changed.subscribe()
                state = self._readiness.state
                status = self._status(request.service, state)
                if status != last:
                    yield health_pb2.HealthCheckResponse(status=status)
                    last = status
                if state is ReadinessState.DRAINING:
                    await asyncio.sleep(DRAIN_NOTICE_SECONDS)  # at an earlier end, gRPC clients would ask again at once
                    return
                await changed.wait()
        finally:
            self._readiness.watchers -= 1

    def _status(self, service: str, state: ReadinessState) -> int:
        if service not in self._services:
            return int(health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
        ready = state is ReadinessState.READY
        return int(health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING)


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


class MetricsHandler:
    """Returns the metrics. Belongs to the event loop's thread.

    A scrape takes some milliseconds of a processor, so there is one at a time, and calls that arrive while it runs
    share the next one.

    Args:
        registry: The registry of the metrics.
        executor: Runs blocking calls.
    """

    def __init__(self, registry: CollectorRegistry, *, executor: Executor) -> None:
        self._registry = registry
        self._executor = executor
        self._scraping = asyncio.Lock()
        self._next: dict[str, asyncio.Task[tuple[bytes, str]]] = {}

    async def get_metrics(
        self, request: metrics_pb2.GetMetricsRequest, call: CallContext
    ) -> metrics_pb2.GetMetricsResponse:
        """Return what ``GET /metrics`` returns."""
        del request, call
        content, content_type = await self.exposition()
        return metrics_pb2.GetMetricsResponse(exposition=content, content_type=content_type)

    async def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """Return the metrics and their content type; see `exposition`."""
        _, content_type = choose_encoder(accept)
        if content_type not in self._next:
            self._next[content_type] = asyncio.create_task(self._scrape(content_type, accept))
        return await asyncio.shield(self._next[content_type])

    async def _scrape(self, content_type: str, accept: str) -> tuple[bytes, str]:
        async with self._scraping:
            del self._next[content_type]  # a call from now on gets what happens from now on
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._executor, exposition, self._registry, accept)
