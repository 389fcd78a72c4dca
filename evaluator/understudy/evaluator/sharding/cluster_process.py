"""The process between `understudy.evaluator.sharding.cluster_pool` and a cluster: it has a socket as standard input."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from understudy.evaluator.evaluator_errors import ConfigurationError, EvaluatorError
from understudy.evaluator.sharding.cluster_pool import ClusterRequest, Nodes, Rest
from understudy.evaluator.sharding.pool import Event, WorkerGone, WorkerId
from understudy.evaluator.sharding.ray_pool import RayPool

_WAIT_SECONDS = 0.5
_HEAD_SECONDS = 1.0


def serve(connection: Connection[Any, Any]) -> None:
    """Receive a `ClusterRequest`, then commands for a `RayPool`, and send its events, or an error.

    Returns when the other side has sent None or closed the connection.
    """
    try:
        request: ClusterRequest = connection.recv()
        pool = RayPool(request.work, request.folder, address=request.address, workers=request.workers)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except EvaluatorError as error:
        connection.send(error)
        return
    try:
        _Commands(pool, connection).run()
    except (BrokenPipeError, ConnectionResetError):
        return
    except EvaluatorError as error:
        connection.send(error)
    finally:
        pool.close()


class _Commands:
    """Carries out commands on a pool, and sends what happens there under the other side's names of the workers."""

    def __init__(self, pool: RayPool, connection: Connection[Any, Any]) -> None:
        self._pool = pool
        self._connection = connection
        self._received: queue.SimpleQueue[tuple[Any, ...] | ClusterRequest | Rest | None] = queue.SimpleQueue()
        self._end = float("inf")
        self._ours: dict[WorkerId, WorkerId] = {}
        self._theirs: dict[WorkerId, WorkerId] = {}
        threading.Thread(target=self._receive, name="understudy-commands", daemon=True).start()

    def run(self) -> None:
        """Return when the other side wants no more, or has wanted nothing for as long as it said."""
        with self._head_watched():
            self._carry_out_all()

    def _carry_out_all(self) -> None:
        capacity = None
        events: Sequence[Event] = ()
        while time.monotonic() < self._end:
            if self._pool.capacity != capacity:
                capacity = self._pool.capacity
                self._connection.send(Nodes(capacity))
            for event in events:
                if event.worker in self._theirs:
                    self._connection.send(replace(event, worker=self._theirs[event.worker]))
            for command in self._waiting():
                if command is None:
                    return
                if isinstance(command, Rest):
                    self._end = time.monotonic() + command.seconds
                elif isinstance(command, ClusterRequest):
                    self._begin(command)
                else:
                    self._carry_out(*command)
            events = self._pool.wait(_WAIT_SECONDS)

    def _begin(self, request: ClusterRequest) -> None:
        self._end = float("inf")
        self._ours.clear()
        self._theirs.clear()
        self._pool.begin(request.work, request.folder)

    def _waiting(self) -> Iterator[tuple[Any, ...] | ClusterRequest | Rest | None]:
        while True:
            try:
                yield self._received.get_nowait()
            except queue.Empty:
                return

    def _carry_out(self, command: str, worker: WorkerId, *arguments: Any) -> None:
        if command == "start":
            if not self._pool.capacity:
                self._connection.send(WorkerGone(worker=worker, reason="the last node has left"))
                return
            ours = self._pool.start_worker()
            self._ours[worker], self._theirs[ours] = ours, worker
        elif worker in self._ours:
            if command == "submit":
                self._pool.submit(self._ours[worker], *arguments)
            else:
                self._pool.kill(self._ours.pop(worker))

    @contextmanager
    def _head_watched(self) -> Iterator[None]:
        over = threading.Event()
        watch = threading.Thread(target=self._watch_head, args=(over,), name="understudy-head")
        watch.start()
        try:
            yield
        finally:
            over.set()
            watch.join()

    def _watch_head(self, over: threading.Event) -> None:
        """End the process when the head of the cluster is gone while nothing is to be computed.

        Ray would look for it for a minute, and a new one hardly starts at its address meanwhile.
        """
        while not over.wait(_HEAD_SECONDS):
            if self._end == float("inf"):
                continue
            try:
                self._pool.check_head()
            except ConfigurationError as error:
                sys.stderr.write(f"{error}\n")  # the last line is the reason that the other side gives
                os._exit(1)

    def _receive(self) -> None:
        while True:
            try:
                command = self._connection.recv()
            except (EOFError, OSError):
                command = None
            self._received.put(command)
            self._pool.wake()
            if command is None:
                return


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal's, for the group; the owner ends this process
        signal.signal(number, signal.SIG_IGN)
    serve(Connection(sys.stdin.fileno()))
