"""A pool on a cluster, reached through a process of its own.

Ray ends the process that is connected to a cluster when the head of the cluster is gone, and cannot be told not to. So
a process between this one and the cluster holds the connection; see `understudy.evaluator.sharding.cluster_process`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import pickle
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from understudy.evaluator.evaluator_errors import ClusterError, ConfigurationError, EvaluatorError
from understudy.evaluator.sharding.child_process import ChildProcess, checked
from understudy.evaluator.sharding.pool import Event, Shard, WorkerGone, WorkerId

if TYPE_CHECKING:  # it imports TensorFlow, which the process of the connection and those of Ray do not need
    from understudy.evaluator.sharding.work import Work

MODE_VARIABLE: Final = "RAY_AUTH_MODE"
"""The environment variable that has Ray ask for a token."""


@dataclass(frozen=True, kw_only=True)
class ClusterRequest:
    """What the process is to compute from now on: its first message, and later ones after a `Rest`.

    Attributes:
        work: A pickled `understudy.evaluator.sharding.work.Work`, which needs TensorFlow to be read.
        folder: The folder of the checkpoint.
        address: The address of the cluster.
        workers: The most nodes to use; None for all.
    """

    work: bytes
    folder: Path
    address: str
    workers: int | None


@dataclass(frozen=True)
class Rest:
    """Nothing is to be computed now. The process ends after so many seconds unless there is a new request."""

    seconds: float


@dataclass(frozen=True)
class Nodes:
    """How many workers there may be now."""

    capacity: int


_MODULE = "understudy.evaluator.sharding.cluster_process"
_END_SECONDS = 10.0

_REACH_SECONDS = 180.0
"""How long it may take until the cluster says how many nodes it has."""


def check_cluster(address: str) -> None:
    """Check what can be checked without the cluster.

    Raises:
        ConfigurationError: Ray is not installed, or not set to use a token.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigurationError(
            f"the cluster {address} needs Ray; install the extra [ray]: pip install understudy[ray]"
        )
    if os.environ.get(MODE_VARIABLE) != "token":
        raise ConfigurationError(
            f"the cluster {address} is used only with a token; set {MODE_VARIABLE}=token and RAY_AUTH_TOKEN_PATH here "
            "and on the cluster"
        )


class ClusterPool:
    """See `understudy.evaluator.sharding.pool.WorkerPool`. There are no nodes until the cluster was reached.

    `wait` raises ClusterError when the cluster cannot be reached, is refused, or is gone.

    Args:
        work: What the workers compute.
        address: The address of the cluster, ``HOST:PORT``, or ``auto`` for one on this machine.
        workers: The most nodes to use; None for all.
        on_nodes: Called with the number of nodes when it changes; must be quick.

    Raises:
        ConfigurationError: See `check_cluster`.
    """

    def __init__(
        self,
        work: Work,
        *,
        address: str,
        workers: int | None = None,
        on_nodes: Callable[[int], None] = lambda _: None,
    ) -> None:
        check_cluster(address)
        self.capacity = 0
        self._address = address
        self._most = workers
        self._on_nodes = on_nodes
        self._reach_until = time.monotonic() + _REACH_SECONDS
        self._ids = itertools.count()
        self._workers: set[WorkerId] = set()
        self._messages: queue.SimpleQueue[Event | Nodes | Exception | None] = queue.SimpleQueue()
        self._process = ChildProcess(_MODULE, name="understudy-cluster", receive=self._receive)
        self._request(work)
        self._process.start()

    def begin(self, work: Work) -> None:
        """Compute something else from now on, with the workers that live. No worker of the former work may be in use.

        Raises:
            ClusterError: The cluster cannot be used, or the process has ended; close the pool.
        """
        self.wait(0.0)
        self._workers.clear()
        self._request(work)

    def rest(self, seconds: float) -> None:
        """Compute nothing for now. The workers are let go and the process ends unless `begin` is called in time."""
        self._process.send(Rest(seconds))

    def _request(self, work: Work) -> None:
        self._process.send(
            ClusterRequest(work=pickle.dumps(work), folder=work.model.folder, address=self._address, workers=self._most)
        )

    @property
    def process_id(self) -> int:
        """The id of the process that holds the connection."""
        return self._process.pid

    def start_worker(self) -> WorkerId:
        """See `WorkerPool`."""
        worker = next(self._ids)
        self._workers.add(worker)
        self._process.send(("start", worker))
        return worker

    def submit(self, worker: WorkerId, shard: Shard) -> None:
        """See `WorkerPool`."""
        self._process.send(("submit", worker, shard))

    def kill(self, worker: WorkerId) -> None:
        """See `WorkerPool`."""
        if worker in self._workers:
            self._workers.remove(worker)
            self._process.send(("kill", worker))

    def wait(self, timeout_seconds: float) -> Sequence[Event]:
        """See `WorkerPool`.

        Raises:
            ClusterError: The cluster cannot be used.
        """
        found: list[Event | Nodes | Exception | None] = []
        with contextlib.suppress(queue.Empty):
            found.append(self._messages.get(timeout=timeout_seconds))
            while True:
                found.append(self._messages.get_nowait())
        events: list[Event] = []
        for message in found:
            if isinstance(message, Exception):
                raise ClusterError(f"the cluster {self._address} cannot be used now: {message}") from message
            if isinstance(message, Nodes):
                self._reach_until = float("inf")
                self.capacity = message.capacity
                self._on_nodes(message.capacity)
            elif message is not None and message.worker in self._workers:
                events.append(message)
        if time.monotonic() > self._reach_until:
            raise ClusterError(f"the cluster {self._address} did not answer for {_REACH_SECONDS:.0f} s")
        self._workers -= {event.worker for event in events if isinstance(event, WorkerGone)}
        return events

    def wake(self) -> None:
        """See `WorkerPool`."""
        self._messages.put(None)

    def close(self) -> None:
        """See `WorkerPool`. The process ends its workers; if it hangs, the cluster does when the process is dead."""
        self._process.send(None)
        self._process.end(_END_SECONDS)

    def _receive(self, connection: Connection[Any, Any]) -> None:
        try:
            while True:
                self._messages.put(checked(connection.recv()))
        except (EOFError, OSError):
            self._messages.put(EvaluatorError(self._process.reason()))
        except Exception as error:  # noqa: BLE001 - the process sent it
            self._messages.put(error)
