"""Rolling restarts: three servers under load are stopped by SIGTERM and started again in turn, and no call fails."""

from __future__ import annotations

import json
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from soak.trial import Trial
from testkit.front_ends import ENVOY, GRPCIO
from testkit.ports import free_ports
from testkit.served import plain_model, publish, serving
from testkit.values import PLAIN, WIDTH
from understudy.clients import Client, UnderstudyError
from understudy.v1 import prediction_pb2, prediction_pb2_grpc
from understudy.wire import encode

ROUNDS = 10
FLEETS = ((GRPCIO,) * 3, (ENVOY,) * 3, (GRPCIO, ENVOY, GRPCIO))
STEP = 1
THREADS = 2
"""How many threads call with each kind of client."""
PAUSE_SECONDS = 0.002
SETTLE_CALLS = 50
SECONDS = 60.0
MOST_FAILURES = 20
"""How many failures a report holds."""

ROUND_ROBIN = {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": ""}}
"""The service config of a plain channel: gRPC's own health checks keep it from servers that start or drain."""

_EXAMPLES = re.compile(r'^understudy_examples_total\{operation="predict"\} (\S+)$', re.MULTILINE)

Call = Callable[[], object]


def run(trial: Trial) -> None:
    """Restart every fleet that is not done yet."""
    rounds = trial.count(ROUNDS)
    found: dict[str, Any] = trial.load_state()
    for fleet in FLEETS:
        name = " ".join(fleet)
        if name in found:
            continue
        with tempfile.TemporaryDirectory() as folder:
            load = roll(Path(folder), fleet, rounds)
        found[name] = {"answered": dict(load.answered), "failures": load.failures[:MOST_FAILURES]}
        trial.save_state(found)
        held = not any(figures["failures"] for figures in found.values())
        trial.report(held=held, restarts_of_each_server=rounds, fleets=found)
    trial.finish()


class Fleet:
    """Servers of one model, each on its own ports, which it keeps when it starts again.

    Args:
        folder: Where their checkpoints and their state are.
        front_ends: The front end of each.
    """

    def __init__(self, folder: Path, front_ends: tuple[str, ...]) -> None:
        publish(folder / PLAIN, {STEP: plain_model(STEP)})
        self._folder = folder
        self._front_ends = front_ends
        self._running = [ExitStack() for _ in front_ends]
        ports = free_ports(2 * len(front_ends))
        self._ports = list(zip(ports[::2], ports[1::2], strict=True))
        self.targets = [f"127.0.0.1:{port}" for port, _ in self._ports]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Start all servers, and stop them at the end of the block."""
        with ExitStack() as stack:
            for running in self._running:
                stack.callback(running.close)
            with ThreadPoolExecutor() as starting:
                list(starting.map(self.start, range(len(self._ports))))
            yield

    def start(self, number: int) -> None:
        """Start a server; return when it is ready."""
        grpc_port, http_port = self._ports[number]
        self._running[number].enter_context(
            serving(
                self._folder / PLAIN,
                PLAIN,
                *("--frontend", self._front_ends[number], "--state-dir", str(self._folder / f"state-{number}")),
                *("--grpc-port", str(grpc_port), "--http-port", str(http_port), "--logical-cpus", "1"),
            )
        )

    def stop(self, number: int) -> None:
        """Send SIGTERM; return when the server has ended with 0."""
        self._running[number].close()

    def wait_until_called(self, number: int) -> None:
        """Wait until a server that has just started has answered predictions."""
        with Client(self.targets[number]) as client:

            def is_called() -> bool:
                found = _EXAMPLES.search(client.metrics())
                return found is not None and float(found[1]) > SETTLE_CALLS

            _wait_until(is_called)


class Load:
    """Threads that call all the time.

    Attributes:
        answered: How many calls of each kind of client have been answered.
        failures: Each failed call: what was being done to which server, the kind of client and the error.
        phase: What is being done to which server.
    """

    def __init__(self) -> None:
        self.answered: Counter[str] = Counter()
        self.failures: list[str] = []
        self.phase = ""
        self._over = threading.Event()

    @contextmanager
    def calling(self, calls: dict[str, Call]) -> Iterator[None]:
        """Call until the end of the block."""
        each = [(kind, call) for kind, call in calls.items() for _ in range(THREADS)]
        threads = [threading.Thread(target=self._call, args=arguments) for arguments in each]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in threads:
                thread.join(SECONDS)

    def settle(self) -> None:
        """Wait until every kind of client has had more answers."""
        wanted = {kind: count + SETTLE_CALLS for kind, count in self.answered.items()}
        _wait_until(lambda: all(self.answered[kind] >= count for kind, count in wanted.items()))

    def _call(self, kind: str, call: Call) -> None:
        while not self._over.is_set():
            try:
                call()
                self.answered[kind] += 1
            except (UnderstudyError, grpc.RpcError) as error:
                self.failures.append(f"{self.phase}: {kind}: {_text(error)}")
            time.sleep(PAUSE_SECONDS)


def roll(folder: Path, front_ends: tuple[str, ...], rounds: int) -> Load:
    """Restart each server in turn this often, under load; return what came of the calls."""
    fleet, load = Fleet(folder, front_ends), Load()
    options = [("grpc.service_config", json.dumps(ROUND_ROBIN)), ("grpc.service_config_disable_resolution", 1)]
    with (
        fleet.running(),
        Client(fleet.targets) as client,
        grpc.insecure_channel(f"ipv4:{','.join(fleet.targets)}", options) as channel,
    ):
        examples = {"x": np.ones((1, WIDTH), np.float32)}
        request = prediction_pb2.PredictRequest(inputs={"x": encode(examples["x"])})
        predict = prediction_pb2_grpc.PredictionServiceStub(channel).Predict
        calls: dict[str, Call] = {
            "client": lambda: client.predict(examples),
            "plain channel": lambda: predict(request, timeout=SECONDS),
        }
        for kind, call in calls.items():
            call()
            load.answered[kind] += 1
        with load.calling(calls):
            for number in list(range(len(front_ends))) * rounds:
                load.settle()
                load.phase = f"stopping {front_ends[number]} {number}"
                fleet.stop(number)
                load.settle()
                load.phase = f"starting {front_ends[number]} {number}"
                fleet.start(number)
                fleet.wait_until_called(number)
            load.settle()
    return load


def _text(error: Exception) -> str:
    return f"{error.code()}: {error.details()}" if isinstance(error, grpc.Call) else repr(error)


def _wait_until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > ends:
            raise TimeoutError(f"calls are not answered within {SECONDS:g} s")
        time.sleep(0.02)
