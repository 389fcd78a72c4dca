"""The service as a whole: what starts in which order, how long it serves, and in which order it ends."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import gc
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from importlib import metadata
from typing import TYPE_CHECKING, Any

import structlog
from starlette.routing import Route

from understudy.evaluator.evaluation.training_end import (
    TRAINED_ANEW,
    ExitReason,
    ServiceExit,
    TrainingEndMonitor,
    TrainingWatch,
)
from understudy.evaluator.evaluator import Evaluator
from understudy.evaluator.settings import EvaluatorSettings
from understudy.evaluator.temporary_folders import delete_abandoned
from understudy.evaluator.types import END_AFTER, HeldBack
from understudy.service import logging
from understudy.service.calls.body_budget import BodyBudget
from understudy.service.calls.metrics import InferenceStatistics, new_registry
from understudy.service.calls.served_call import Guard, ServedMethods, served_methods
from understudy.service.evaluator_metrics import CheckpointTracer, EvaluatorCollector, RunCollector, ServiceObserver
from understudy.service.events.webhook import Destinations
from understudy.service.features import Features
from understudy.service.fleet.evaluator_link import GrpcEvaluatorLink
from understudy.service.fleet.fleet_handler import FleetHandler
from understudy.service.fleet.fleet_state import FleetMetrics
from understudy.service.front_end import HandleSignals, MakeFrontEnd, load_front_end
from understudy.service.handlers.compare_stream import Spools
from understudy.service.handlers.evaluate_stream import StreamLimits
from understudy.service.handlers.evaluation_handler import EvaluationHandler
from understudy.service.handlers.inference_handler import InferenceHandler
from understudy.service.handlers.prediction_handler import PredictionHandler, Predictor
from understudy.service.handlers.status_handlers import MetricsHandler, ModelHandler
from understudy.service.page.history import History
from understudy.service.page.page_app import PageApp
from understudy.service.ports import Announce, Ports
from understudy.service.readiness import DeviceWatch, Notifier, Readiness
from understudy.service.rest.rest_app import RestApp
from understudy.service.rest.rest_routes import RestRoutes
from understudy.service.served_model import ServedModel
from understudy.service.services import RequestHandlers, all_services, standby_services
from understudy.service.settings import ServeSettings
from understudy.service.templates.codecs import template_codecs

if TYPE_CHECKING:
    from understudy.evaluator.factory import NamedEvaluator

POLL_SECONDS = 0.5
"""How often to check whether training has ended, or was begun anew."""

TRIM_SECONDS = 2.0
"""How often to check whether freed memory is to be given back to the system."""

TRAINING_SECONDS = 30.0
"""How often to look at the training for those who show it."""

STANDBY_SECONDS = 0.25
"""How often to check whether the state folder is free."""

BLOCKING_THREADS = 8
"""How many blocking calls (the ledger, a scrape) may run at once."""

_log = structlog.get_logger(__name__)


def serve(settings: ServeSettings, evaluator_settings: EvaluatorSettings) -> ServiceExit:
    """Serve until SIGTERM or SIGINT, or until training ends if the settings say so; then drain and return the reason.

    It also ends when the run folder was deleted and trained anew: then the caller starts the program again.

    A second signal ends the process at once. With the envoy front end, this process first becomes Envoy. Envoy re-runs
    this program, and control returns here.

    Prints ``LISTENING grpc=H:P http=H:P`` when both ports accept calls, and ``READY grpc=H:P http=H:P step=S`` when the
    first checkpoint is serving. Call it from the main thread.

    Args:
        settings: The settings of the service.
        evaluator_settings: The settings of the evaluator; `ServeSettings.evaluator_state_dir` overrides ``state_dir``.

    Raises:
        ServiceError: A port is not available, a certificate cannot be used, or the front end does not start.
        ModuleNotFoundError: The front end's extra is not installed, or that of the traces.
        ExperimentError: The experiment cannot be loaded.
        EvaluatorError: A setting, a dataset or the ledger cannot be used.
        CheckpointError: Another evaluator uses the state folder, or it holds something else.
    """
    logging.configure(
        level=settings.log_level, log_format=settings.log_format, withhold_values=bool(settings.request_log_redact)
    )
    delete_abandoned()
    run = load_front_end(settings.frontend)
    return run(settings, functools.partial(_serve_until_signalled, settings, evaluator_settings))


async def _serve_until_signalled(
    settings: ServeSettings,
    evaluator_settings: EvaluatorSettings,
    make_front_end: MakeFrontEnd,
    handle_signals: HandleSignals,
) -> ServiceExit:
    stop = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        _log.info("draining; another signal, not within a second, ends the process at once", signal=number.name)
        stop.set()

    handle_signals(on_signal)
    service = Service(settings, evaluator_settings, announce=_print_line, make_front_end=make_front_end)
    return await service.run(stop)


class Service:
    """One service on the running event loop.

    Args:
        settings: The settings of the service.
        evaluator_settings: The settings of the evaluator.
        announce: Prints the lines that scripts wait for.
        make_front_end: Creates the gRPC front end.
    """

    def __init__(
        self,
        settings: ServeSettings,
        evaluator_settings: EvaluatorSettings,
        *,
        announce: Announce,
        make_front_end: MakeFrontEnd,
    ) -> None:
        self._settings = settings
        self._evaluator_settings = evaluator_settings
        self._announce = announce
        self._make_front_end = make_front_end
        self._loop = asyncio.get_running_loop()
        self._readiness = Readiness()
        self._recorded = Notifier()
        folder = settings.journal_folder
        self._training = None if folder is None else TrainingWatch(folder)
        self._statistics = InferenceStatistics()
        self._registry = new_registry()
        self._fleet: FleetHandler | None = None
        self._executor = ThreadPoolExecutor(BLOCKING_THREADS, thread_name_prefix="service")
        self._builder = ThreadPoolExecutor(1, thread_name_prefix="requests")

    async def run(self, stop: asyncio.Event) -> ServiceExit:
        """Serve until ``stop`` is set, or training ends if the settings say so; then drain.

        The steps of the end are those of the start in reverse, and depend on that order:

        1. The trials of failing devices stop, so that none begins on devices that are about to close.
        2. The address file disappears, so that no program finds the addresses any more.
        3. Readiness changes to draining. If callers watch the health, they have a moment to choose another server.
           Then the gRPC front end refuses new calls and finishes the running ones.
        4. The HTTP port closes, which until then reports the draining in ``/readyz``, and serves ``/metrics``.
        5. The request log writes what it holds, and drift is no longer computed, as no request can reach them any more.
        6. The events that wait are delivered, for some seconds and while nothing fails; others wait for the next start.
        7. The evaluator closes, as no call can reach it any more; until then the running ones could.
        8. The traces that wait are sent, as no span can be added any more.
        9. The executors stop, on which all of the above ran blocking work.

        Raises the errors of `serve`.
        """
        async with AsyncExitStack() as stack:
            stack.callback(self._executor.shutdown, cancel_futures=True)
            stack.callback(self._builder.shutdown, cancel_futures=True)
            # Certificates and ports first: what is wrong with them is reported at once, before TensorFlow is imported.
            features = Features(self._settings, stack, registry=self._registry, executor=self._executor)
            certificates = features.certificates()
            guard = await features.guard()
            tracing = await features.tracing()
            destinations = await features.destinations()
            front_end = self._make_front_end(certificates)
            ports = Ports(
                self._settings,
                front_end,
                certificates,
                stack,
                readiness=self._readiness,
                announce=self._announce,
                on_draining=self._end_watches,
            )
            link = features.link(ports.grpc)
            tracer = None if tracing is None else tracing.checkpoints
            opened, observer = await self._create_evaluator(destinations, tracer, link)
            if self._settings.standby and not stop.is_set():
                await self._stand_by(stop, opened.evaluator, ports)
            if stop.is_set():
                await self._loop.run_in_executor(self._executor, opened.evaluator.close)
                return ServiceExit(reason=ExitReason.SIGNALLED)
            self._readiness.held_back = lambda: _why_not_serving(opened.evaluator.held_back)
            trimming = asyncio.create_task(self._keep_trimming())
            stack.callback(trimming.cancel)
            history = await self._start_evaluator(stack, opened.evaluator, observer)
            model = ServedModel(name=self._settings.model_name or opened.model_name, evaluator=opened.evaluator)
            features.refresh_keys(opened.evaluator)
            await features.deliver(destinations, model)
            samplers = await features.samplers(opened.evaluator, link)
            handlers = self._handlers(model, Predictor(opened.evaluator, front_end.coalescing, samplers), link)
            self._fleet = handlers.fleet
            services = all_services(handlers, self._readiness, template_codecs())
            methods = served_methods(services, self._registry, guard, None if tracing is None else tracing.calls)
            routes = [
                *self._rest(handlers, methods),
                *self._page(model, history, handlers.fleet, guard, methods).routes(),
            ]
            await ports.serve(stack, methods, routes)
            opened.evaluator.on_ready(functools.partial(self._announce_ready, ports.addresses))
            devices = self._watch_devices(stack, opened.evaluator)
            return await self._end_or_failure(stop, opened.evaluator, devices.failed)

    async def _end_or_failure(
        self, stop: asyncio.Event, evaluator: Evaluator, failed: asyncio.Future[str]
    ) -> ServiceExit:
        """Wait for the end, or for the devices to fail permanently, and return the reason."""
        end = asyncio.create_task(self._end(stop, evaluator))
        either: list[asyncio.Future[Any]] = [end, failed]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if end.done():
                return await end
        finally:
            end.cancel()
        times = END_AFTER * self._evaluator_settings.max_device_failures
        return ServiceExit(
            reason=ExitReason.DEVICE_FAILED, message=f"the devices failed {times} times in a row: {failed.result()}"
        )

    async def _end(self, stop: asyncio.Event, evaluator: Evaluator) -> ServiceExit:
        """Wait for the end and return the reason."""
        folder, training = self._settings.journal_folder, None
        if folder is not None and self._settings.exit_when_finished:
            training = TrainingEndMonitor(folder, evaluator, timeout_seconds=self._settings.exit_timeout_seconds)
        while not stop.is_set():
            service_exit = TRAINED_ANEW if self._would_begin_anew(evaluator) else None
            if training is not None and service_exit is None:
                service_exit = await self._loop.run_in_executor(self._executor, training.check)
            if service_exit is not None:
                _log.info(service_exit.message, ending=service_exit.reason.value)
                if service_exit is TRAINED_ANEW:
                    await self._loop.run_in_executor(self._executor, evaluator.hand_over)
                return service_exit
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), POLL_SECONDS)
        return ServiceExit(reason=ExitReason.SIGNALLED)

    def _would_begin_anew(self, evaluator: Evaluator) -> bool:
        """Return whether a start of this program begins with another training, or stands by for its evaluator."""
        return evaluator.is_trained_anew and (evaluator.has_no_ledger or self._settings.standby)

    async def _stand_by(self, stop: asyncio.Event, evaluator: Evaluator, ports: Ports) -> None:
        """Wait while another evaluator uses the state folder, and answer that this server is not ready.

        If ``stop`` is set first, nothing answers any more.
        """
        user = await self._loop.run_in_executor(self._executor, evaluator.own_state_dir)
        if not user:
            return
        async with AsyncExitStack() as stack:
            self._readiness.held_back = lambda: f"standing by: {user}"
            await ports.serve(stack, served_methods(standby_services(self._readiness), new_registry()))
            _log.info("standing by", reason=user)
            while user and not stop.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), STANDBY_SECONDS)
                user = await self._loop.run_in_executor(self._executor, evaluator.own_state_dir)
            if stop.is_set():
                return
            stack.pop_all()  # the service goes on with both ports
        _log.info("taking over")

    async def _create_evaluator(
        self, destinations: Destinations, tracer: CheckpointTracer | None, link: GrpcEvaluatorLink | None
    ) -> tuple[NamedEvaluator, ServiceObserver]:
        from understudy.evaluator.factory import create_evaluator  # imports TensorFlow, so it runs after the bind

        observer = ServiceObserver(
            self._registry,
            statistics=self._statistics,
            on_record=self._recorded.notify_threadsafe,
            tracer=tracer,
            traffic=None if link is None else link.traffic,
        )
        state_dir = self._settings.evaluator_state_dir
        evaluator_settings = dataclasses.replace(self._evaluator_settings, state_dir=state_dir)
        create = functools.partial(
            create_evaluator,
            self._settings.location,
            evaluator_settings,
            observer,
            subscriptions=destinations.subscriptions,
            link=link,
        )
        opened = await self._loop.run_in_executor(self._executor, create)
        _freeze_heap()  # before the first model is loaded: frozen objects are never collected
        return opened, observer

    async def _start_evaluator(self, stack: AsyncExitStack, evaluator: Evaluator, observer: ServiceObserver) -> History:
        await self._loop.run_in_executor(self._executor, evaluator.start)
        stack.push_async_callback(self._close_evaluator, evaluator)
        monitor = evaluator.monitor
        history = History(evaluator.ledger, None if monitor is None else (monitor.dataset, monitor.metric))
        await self._loop.run_in_executor(self._executor, observer.recall, evaluator.ledger, history.add)
        self._registry.register(EvaluatorCollector(evaluator))
        if self._training is not None:
            self._registry.register(RunCollector(self._training))
            watching = asyncio.create_task(self._keep_watching(self._training))
            stack.callback(watching.cancel)
        return history

    def _rest(self, handlers: RequestHandlers, methods: ServedMethods) -> list[Route]:
        from understudy.service.rest.tfserving_app import TfServingRestApp  # imports TensorFlow

        routes = RestRoutes(
            methods,
            max_body_bytes=self._settings.max_rest_bytes,
            bodies=BodyBudget(self._settings.max_body_bytes),
            executor=self._builder,
        )
        return [
            *RestApp(handlers.inference, handlers.metrics, routes, readiness=self._readiness).routes(),
            *TfServingRestApp(handlers.tf_serving, routes, readiness=self._readiness).routes(),
        ]

    def _page(
        self, model: ServedModel, history: History, fleet: FleetHandler, guard: Guard | None, methods: ServedMethods
    ) -> PageApp:
        return PageApp(
            model,
            settings=self._evaluator_settings,
            history=history,
            fleet=fleet.fleet,
            guard=guard,
            methods=methods,
            read_only=self._settings.read_only,
            training=self._training,
            registry=self._registry,
            readiness=self._readiness,
            recorded=self._recorded,
            executor=self._executor,
            max_connections=self._settings.max_http_connections,
        )

    def _watch_devices(self, stack: AsyncExitStack, evaluator: Evaluator) -> DeviceWatch:
        devices = DeviceWatch(evaluator, self._readiness)
        stack.push_async_callback(devices.stop)
        return devices

    def _handlers(self, model: ServedModel, predictor: Predictor, link: GrpcEvaluatorLink | None) -> RequestHandlers:
        from understudy.service.handlers.tfserving_handler import TfServingHandler  # imports TensorFlow

        settings = self._settings
        return RequestHandlers(
            prediction=PredictionHandler(model, predictor, stream_depth=settings.stream_depth),
            evaluation=EvaluationHandler(
                model,
                recorded=self._recorded,
                readiness=self._readiness,
                executor=self._executor,
                limits=StreamLimits(
                    idle_seconds=self._evaluator_settings.stream_idle_timeout_seconds,
                    total_seconds=settings.stream_timeout_seconds,
                ),
                spools=Spools(settings.spool_dir, max_bytes=settings.spool_mib * 1024 * 1024),
                records=not settings.read_only,
            ),
            model=ModelHandler(
                model,
                executor=self._executor,
                read_only=settings.read_only,
                followed=self._evaluator_settings.follow,
            ),
            fleet=FleetHandler(
                model,
                fleet=FleetMetrics(self._registry, link).fleet,
                readiness=self._readiness,
                software_version=metadata.version("understudy"),
                has_contact=lambda: link is None or link.is_connected,
                executor=self._executor,
            ),
            metrics=MetricsHandler(self._registry, executor=self._executor),
            inference=InferenceHandler(
                model,
                predictor,
                settings=self._evaluator_settings,
                statistics=self._statistics,
                readiness=self._readiness,
                stream_depth=settings.stream_depth,
                executor=self._builder,
            ),
            tf_serving=TfServingHandler(
                model, predictor, max_tensor_bytes=settings.max_message_bytes, executor=self._builder
            ),
        )

    def _announce_ready(self, addresses: str, step: int) -> None:
        """Called on any thread when the first version serves."""

        def become_ready() -> None:
            self._readiness.become_ready()
            self._announce(f"READY {addresses} step={step}")

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(become_ready)

    def _end_watches(self) -> None:
        """End the calls that would last: watches of evaluations, and the servers that follow."""
        self._recorded.notify()
        if self._fleet is not None:
            self._fleet.stop()

    async def _keep_trimming(self) -> None:
        """Give freed memory back to the system, until this is cancelled."""
        from understudy.evaluator.model.reclaiming import MemoryTrimmer  # imports TensorFlow

        trimmer = MemoryTrimmer()
        while True:
            await asyncio.sleep(TRIM_SECONDS)
            await self._loop.run_in_executor(self._executor, trimmer.trim_if_grown)

    async def _keep_watching(self, training: TrainingWatch) -> None:
        """Look at the training often enough to tell whether it lives, until this is cancelled."""
        while True:
            await self._loop.run_in_executor(self._executor, training.read)
            await asyncio.sleep(TRAINING_SECONDS)

    async def _close_evaluator(self, evaluator: Evaluator) -> None:
        await self._loop.run_in_executor(self._executor, evaluator.close)
        _log.info("stopped")


def _freeze_heap() -> None:
    """Exclude the libraries' 300,000 objects from garbage collection: a full one stops all threads for 0.1 s."""
    gc.collect()
    gc.freeze()


def _why_not_serving(held_back: HeldBack | None) -> str:
    return "" if held_back is None else f"no checkpoint is serving yet; {held_back.reason}"


def _print_line(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - scripts wait for it
