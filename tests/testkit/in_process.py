"""Whole services: in this process, on a thread with its own event loop, or as a separate process."""

from __future__ import annotations

import asyncio
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from testkit.front_ends import GRPCIO
from testkit.preloading import preloaded
from understudy.clients import Client
from understudy.evaluator.settings import EvaluatorSettings
from understudy.service.grpcio.grpc_server import server_of
from understudy.service.server import Service
from understudy.service.settings import ServeSettings

START_SECONDS = 200.0
WAIT_SECONDS = 150.0
"""How long to wait for an expected event; reached only if a test fails."""

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.01, 0.05
"""How long `until` pauses before it asks again: each time a little longer, as asking costs the processor time."""

_ADDRESSES = re.compile(r"(LISTENING|READY) grpc=(\S+) http=(\S+)(?: step=(\d+))?")


def until(condition: Callable[[], bool]) -> None:
    """Poll until the condition holds."""
    ends = time.monotonic() + WAIT_SECONDS
    pause = FIRST_PAUSE_SECONDS
    while not condition():
        assert time.monotonic() < ends, "it did not come about"
        time.sleep(pause)
        pause = min(1.1 * pause, LONGEST_PAUSE_SECONDS)


@dataclass
class RunningService:
    """A running service.

    Attributes:
        grpc: The gRPC address.
        http: The HTTP address.
        lines: The lines that it prints after LISTENING.
        start_stopping: Does what SIGTERM does.
        join: Waits until it has ended.
        in_process: Whether it runs in this process.
        clients: Clients that are closed with it.
    """

    grpc: str
    http: str
    lines: queue.Queue[str]
    start_stopping: Callable[[], None]
    join: Callable[[], None]
    in_process: bool
    clients: list[Client] = field(default_factory=list)

    def wait_ready(self) -> int:
        """Wait until the first checkpoint is serving; return its step."""
        match = _ADDRESSES.fullmatch(self.lines.get(timeout=WAIT_SECONDS))
        assert match is not None
        assert match[1] == "READY"
        return int(match[4])

    def client(self, **options: Any) -> Client:
        """Return a client, which is closed with the service."""
        client = Client(self.grpc, **options)
        self.clients.append(client)
        return client

    def answers(self, path: str) -> int:
        """Return the HTTP port's status for a path."""
        return httpx.get(f"http://{self.http}{path}").status_code

    def metric(self, name: str, **labels: str) -> float:
        """Return the value of one series."""
        lines = [line for line in self.client().metrics().splitlines(keepends=True) if line.startswith(name)]
        families = text_string_to_metric_families("".join(lines))  # parsing all of them takes long
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        (found,) = [sample.value for sample in samples if labels.items() <= sample.labels.items()]
        return found


@contextmanager
def running_service(
    settings: dict[str, Any],
    evaluator: dict[str, Any],
    *,
    replicas: tuple[str, ...],
    state_dir: Path,
    front_end: str = GRPCIO,
) -> Iterator[RunningService]:
    """Run a service on free ports, with one replica on each of these devices; end it afterwards.

    With grpcio it runs in this process; envoy needs a separate one, which becomes Envoy.
    """
    chosen = {"grpc_port": 0, "http_port": 0, "state_dir": state_dir, **settings}
    evaluator = {"poll_interval_seconds": 0.05, **evaluator}
    if front_end == GRPCIO:
        serve_settings = ServeSettings(**chosen)
        defaults = {"devices": replicas, "self_tuning": False}
        service = _start(serve_settings, EvaluatorSettings(state_dir=state_dir, **{**defaults, **evaluator}))
    else:
        options = {**chosen, **evaluator, "frontend": front_end, "logical_cpus": len(replicas)}
        service = _start_process(options)
    try:
        yield service
    finally:
        for client in service.clients:
            client.close()
        service.start_stopping()
        service.join()


def _start(settings: ServeSettings, evaluator_settings: EvaluatorSettings) -> RunningService:
    lines: queue.Queue[str] = queue.Queue()
    started: queue.Queue[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = queue.Queue()
    failures: list[Exception] = []

    make_front_end = partial(server_of, settings)

    async def main() -> None:
        stop = asyncio.Event()
        started.put((asyncio.get_running_loop(), stop))
        service = Service(settings, evaluator_settings, announce=lines.put, make_front_end=make_front_end)
        await service.run(stop)

    def run() -> None:
        try:
            asyncio.run(main())
        except Exception as error:  # noqa: BLE001 - raised again where the service is waited for
            failures.append(error)
            lines.put(f"failed: {error!r}")

    def start_stopping() -> None:
        if thread.is_alive():
            loop.call_soon_threadsafe(stop.set)

    def join() -> None:
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()
        assert failures == []

    thread = threading.Thread(target=run, name="service-under-test")
    thread.start()
    loop, stop = started.get(timeout=WAIT_SECONDS)
    match = _ADDRESSES.fullmatch(lines.get(timeout=WAIT_SECONDS))
    if match is None:
        thread.join()
        raise failures[0]
    return RunningService(
        grpc=match[2], http=match[3], lines=lines, start_stopping=start_stopping, join=join, in_process=True
    )


def _start_process(options: Mapping[str, Any]) -> RunningService:
    process = subprocess.Popen(
        [sys.executable, "-m", "understudy.cli", "serve", *_flags(options)],
        env={**os.environ, **preloaded(), "TF_CPP_MIN_LOG_LEVEL": "2"},
        stdout=subprocess.PIPE,
        text=True,
    )
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout as output:
            for line in output:
                lines.put(line.rstrip("\n"))
        lines.put("ended")

    def start_stopping() -> None:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)

    def join() -> None:
        try:
            assert process.wait(WAIT_SECONDS) == 0
        finally:
            process.kill()
            reading.join()

    reading = threading.Thread(target=read, name="lines-of-service-under-test")
    reading.start()
    match = _ADDRESSES.fullmatch(lines.get(timeout=START_SECONDS))
    if match is None:
        join()
        raise AssertionError("the service ended before it listened")
    return RunningService(
        grpc=match[2], http=match[3], lines=lines, start_stopping=start_stopping, join=join, in_process=False
    )


def _flags(options: Mapping[str, Any]) -> list[str]:
    def text(value: Any) -> str:
        return ",".join(f"{key}={each}" for key, each in value.items()) if isinstance(value, Mapping) else str(value)

    def flag(name: str, value: Any) -> str:
        name = name.replace("_", "-")
        if isinstance(value, bool):
            return f"--{name}" if value else f"--no-{name}"
        return f"--{name}={text(value)}"

    return [flag(name, value) for name, value in options.items()]
