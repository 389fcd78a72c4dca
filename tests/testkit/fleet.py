"""An evaluator and three servers that follow it over the network, and calls to them."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from testkit.checkpoints import Chief, ones
from testkit.in_process import START_SECONDS, WAIT_SECONDS, RunningService, running_service, until
from testkit.preloading import preloaded
from understudy.clients import Client, UnavailableError, UnderstudyError
from understudy.clients.client_errors import UnimplementedError
from understudy.evaluator.serving.rollout_file import RunningRollout

NAMES = ("one", "two", "three")


class Fleet:
    """An evaluator, which can be ended and started again, and three servers that follow it.

    It scores the checkpoints on ``test.npz``, if that exists.

    Attributes:
        chief: Publishes the checkpoints.
        address: The addresses of the evaluator.
        client: A client of the evaluator.
        servers: The servers, by their names.
        clients: A client of each.
    """

    address: str
    client: Client
    servers: dict[str, RunningService]
    clients: dict[str, Client]

    def __init__(self, folder: Path, replicas: tuple[str, ...]) -> None:
        self._folder = folder
        self._replicas = replicas
        self._stack = ExitStack()
        self._evaluator_stack = ExitStack()
        self._port = 0
        self.chief = Chief(folder / "run")

    def evaluate(self, **evaluator: Any) -> RunningService:
        """Start the evaluator, at the same address as before."""
        data = self._folder / "test.npz"
        settings = {
            "run_dir": self._folder / "run",
            "grpc_port": self._port,
            "eval_data": {"test": data} if data.exists() else {},
        }
        state_dir = self._folder / "run" / "evaluator"
        running = self._evaluator_stack.enter_context(
            running_service(settings, evaluator, replicas=self._replicas, state_dir=state_dir)
        )
        self.address, self.client = running.grpc, running.client()
        self._port = int(running.grpc.rpartition(":")[2])
        return running

    def follow(self, **evaluator: Any) -> None:
        """Start the servers."""
        self.servers = {name: self._follow(name, **evaluator) for name in NAMES}
        for server in self.servers.values():
            server.wait_ready()
        until(lambda: sum(each.connected for each in self.client.fleet().servers) == len(NAMES))
        self.clients = {name: server.client() for name, server in self.servers.items()}

    def _follow(self, name: str, **evaluator: Any) -> RunningService:
        settings = {"follow": self.address, "follow_name": name}
        evaluator = {"follow": self.address, "poll_interval_seconds": 3600.0, **evaluator}
        state_dir = self._folder / "states" / name
        return self._stack.enter_context(
            running_service(settings, evaluator, replicas=self._replicas, state_dir=state_dir)
        )

    def end_evaluator(self) -> None:
        self._evaluator_stack.close()

    def close(self) -> None:
        with self._evaluator_stack:
            self._stack.close()

    def served(self) -> list[int]:
        """Return the steps that the servers answer with."""
        return sorted(client.predict({"x": ones(1)}).step for client in self.clients.values())

    def outcomes(self) -> list[tuple[int, str]]:
        """Return the steps of rollouts in the ledger."""
        return [
            (entry.step, entry.outcome.removeprefix("rollout_"))
            for entry in self.client.list_evaluations()
            if entry.outcome.startswith("rollout_")
        ]

    def last_reason(self) -> str:
        """Return why the last step of a rollout was taken."""
        return [entry.reason for entry in self.client.list_evaluations() if entry.outcome.startswith("rollout_")][-1]

    def begin(self) -> str:
        """Serve step 10 everywhere, publish step 20, and return the name of the server that serves it first."""
        self.chief.publish(20)
        return self.part_of(20)

    def part_of(self, step: int) -> str:
        """Wait for the rollout of a step; return the name of the server that serves it first."""
        parts: list[str] = []

        def is_rolled_out() -> bool:
            rollout = self.client.fleet().rollout
            if rollout is not None and rollout.step == step:
                parts.extend(rollout.servers)
            return bool(parts)

        until(is_rolled_out)
        (name,) = parts
        return name


@contextmanager
def unfinished_rollouts() -> Iterator[None]:
    """Keep every rollout of this process under way, however much time passes on a slow machine; not so afterwards."""
    is_over = RunningRollout.is_over
    with mock.patch.object(RunningRollout, "is_over", property(lambda _: False)):
        yield
    assert RunningRollout.is_over is is_over


@contextmanager
def traffic(clients: Mapping[str, Client], *, answer: int | None = None) -> Iterator[tuple[list[int], list[str]]]:
    """Call each server in turn until the end; yields the steps of the answers and the errors.

    Each version answers with its step, or all with ``answer``.
    """
    answered: list[int] = []
    failed: list[str] = []
    ended = threading.Event()

    def call() -> None:
        while not ended.is_set():
            for client in clients.values():
                try:
                    result = client.predict({"x": ones(1)})
                except UnderstudyError as error:
                    failed.append(str(error))
                    continue
                np.testing.assert_allclose(result.outputs["y"], result.step if answer is None else answer, rtol=1e-5)
                answered.append(result.step)
            ended.wait(0.02)

    thread = threading.Thread(target=call, name="traffic")
    thread.start()
    try:
        yield answered, failed
    finally:
        ended.set()
        thread.join()


def serving_step(client: Client) -> int | None:
    """Return the step that an evaluator serves; None if it stands by."""
    try:
        return client.status().serving_step
    except (UnimplementedError, UnavailableError):
        return None


@contextmanager
def evaluator_process(folder: Path, port: int, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run ``understudy serve`` of the run in a process; yield it and its address."""
    command = [sys.executable, "-m", "understudy.cli", "serve", "--run-dir", str(folder / "run"), "--http-port=0"]
    process = subprocess.Popen(
        [*command, f"--grpc-port={port}", "--logical-cpus=1", "--poll-interval-seconds=0.05", *options],
        env={**os.environ, **preloaded(), "TF_CPP_MIN_LOG_LEVEL": "2"},
        stdout=subprocess.PIPE,
        text=True,
    )
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout as output:
            for line in output:
                lines.put(line)

    reading = threading.Thread(target=read, name="lines-of-evaluator")
    reading.start()
    try:
        first = lines.get(timeout=START_SECONDS)
        assert first.startswith("LISTENING grpc="), first
        yield process, first.split()[1].removeprefix("grpc=")
    finally:
        process.kill()
        process.wait(WAIT_SECONDS)
        reading.join()
