"""The whole service in this process, on a thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from understudy.clients import Client
from understudy.evaluator.settings import EvaluatorSettings
from understudy.service.server import Service
from understudy.service.settings import ServeSettings

WAIT_SECONDS = 60.0
"""How long to wait for what must happen; never reached unless a test fails."""

ASK_SECONDS = 0.02
"""How often to ask the other side of a wire for what cannot be awaited."""

_ADDRESSES = re.compile(r"(LISTENING|READY) grpc=(\S+) http=(\S+)(?: step=(\d+))?")


def until(condition: Callable[[], bool]) -> None:
    """Ask over and over until it is so."""
    ends = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < ends, "it did not come about"
        time.sleep(ASK_SECONDS)


@dataclass
class RunningService:
    """A service that listens."""

    grpc: str
    http: str
    lines: queue.Queue[str]
    loop: asyncio.AbstractEventLoop
    stop: asyncio.Event
    thread: threading.Thread
    failures: list[Exception]
    clients: list[Client] = field(default_factory=list)

    def wait_ready(self) -> int:
        """Wait until the first checkpoint is on stage; return its step."""
        match = _ADDRESSES.fullmatch(self.lines.get(timeout=WAIT_SECONDS))
        assert match is not None
        assert match[1] == "READY"
        return int(match[4])

    def client(self, **options: Any) -> Client:
        """Return a client, which is closed with the service."""
        client = Client(self.grpc, **options)
        self.clients.append(client)
        return client

    def start_stopping(self) -> None:
        """Do what SIGTERM does."""
        self.loop.call_soon_threadsafe(self.stop.set)

    def join(self) -> None:
        """Wait until the service has ended."""
        self.thread.join(WAIT_SECONDS)
        assert not self.thread.is_alive()
        assert self.failures == []

    def answers(self, path: str) -> int:
        """Return the HTTP port's status for a path."""
        return httpx.get(f"http://{self.http}{path}").status_code

    def metric(self, name: str, **labels: str) -> float:
        """Return the value of one series."""
        families = text_string_to_metric_families(self.client().metrics())
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        (found,) = [sample.value for sample in samples if labels.items() <= sample.labels.items()]
        return found


@contextmanager
def running_service(
    settings: dict[str, Any], evaluator: dict[str, Any], *, replicas: tuple[str, ...], state_dir: Path
) -> Iterator[RunningService]:
    """Run a service on free ports, with one replica on each of these devices; end it afterwards."""
    serve_settings = ServeSettings(grpc_port=0, http_port=0, state_dir=state_dir, **settings)
    chosen = {"poll_interval_seconds": 0.05, "devices": replicas, **evaluator}
    service = _start(serve_settings, EvaluatorSettings(state_dir=state_dir, **chosen))
    try:
        yield service
    finally:
        for client in service.clients:
            client.close()
        if service.thread.is_alive():
            service.start_stopping()
        service.join()


def _start(settings: ServeSettings, evaluator_settings: EvaluatorSettings) -> RunningService:
    lines: queue.Queue[str] = queue.Queue()
    started: queue.Queue[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = queue.Queue()
    failures: list[Exception] = []

    async def main() -> None:
        stop = asyncio.Event()
        started.put((asyncio.get_running_loop(), stop))
        await Service(settings, evaluator_settings, announce=lines.put).run(stop)

    def run() -> None:
        try:
            asyncio.run(main())
        except Exception as error:  # noqa: BLE001 - raised again where the service is waited for
            failures.append(error)
            lines.put(f"failed: {error!r}")

    thread = threading.Thread(target=run, name="service-under-test")
    thread.start()
    loop, stop = started.get(timeout=WAIT_SECONDS)
    line = lines.get(timeout=WAIT_SECONDS)
    match = _ADDRESSES.fullmatch(line)
    if match is None:
        thread.join()
        raise failures[0]
    return RunningService(
        grpc=match[2], http=match[3], lines=lines, loop=loop, stop=stop, thread=thread, failures=failures
    )
