"""A pool of processes on this machine."""

from __future__ import annotations

import contextlib
import itertools
import queue
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from understudy.checkpoints.temporary_folders import TemporaryFolder
from understudy.evaluator.sharding.child_process import ChildProcess, checked
from understudy.evaluator.sharding.pool import (
    Event,
    Shard,
    ShardComputed,
    WorkerGone,
    WorkerId,
    WorkerReady,
    WorkFailed,
)
from understudy.evaluator.sharding.work import Work

_MODULE = "understudy.evaluator.sharding.worker"


class LocalPool:
    """See `understudy.evaluator.sharding.pool.WorkerPool`. Each worker is a process with a model of its own.

    A worker ends when this process does. Their temporary files are in one folder, which is deleted at the end, as they
    are killed.

    Args:
        work: What the workers compute.
        workers: The number of processes.
    """

    def __init__(self, work: Work, *, workers: int) -> None:
        self._work = work
        self.capacity = workers
        self._ids = itertools.count()
        self._workers: dict[WorkerId, ChildProcess] = {}
        self._temporary: TemporaryFolder | None = None
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()

    @property
    def process_ids(self) -> Sequence[int]:
        """The ids of the processes that run, the oldest first."""
        return [process.pid for process in list(self._workers.values())]

    def start_worker(self) -> WorkerId:
        """See `WorkerPool`."""
        if self._temporary is None:
            self._temporary = TemporaryFolder()
        worker = next(self._ids)
        process = ChildProcess(
            _MODULE,
            name=f"understudy-worker-{worker}",
            receive=lambda connection: self._receive(worker, connection),
            temporary=self._temporary.path,
        )
        self._workers[worker] = process
        process.send(self._work)
        process.start()
        return worker

    def submit(self, worker: WorkerId, shard: Shard) -> None:
        """See `WorkerPool`."""
        self._workers[worker].send(shard)

    def kill(self, worker: WorkerId) -> None:
        """See `WorkerPool`."""
        process = self._workers.pop(worker, None)
        if process is not None:
            process.kill()

    def wait(self, timeout_seconds: float) -> Sequence[Event]:
        """See `WorkerPool`."""
        found: list[Event | None] = []
        with contextlib.suppress(queue.Empty):
            found.append(self._events.get(timeout=timeout_seconds))
            while True:
                found.append(self._events.get_nowait())
        events = [event for event in found if event is not None and event.worker in self._workers]
        for event in events:
            if isinstance(event, WorkerGone):
                self.kill(event.worker)
        return events

    def wake(self) -> None:
        """See `WorkerPool`."""
        self._events.put(None)

    def close(self) -> None:
        """See `WorkerPool`."""
        for process in self._workers.values():
            process.kill_soon()  # all at once; then wait for each
        for worker in list(self._workers):
            self.kill(worker)
        if self._temporary is not None:
            self._temporary.delete()

    def _receive(self, worker: WorkerId, connection: Connection[Any, Any]) -> None:
        try:
            self._events.put(WorkerReady(worker=worker, facts=checked(connection.recv())))
            while True:
                shard, result = checked(connection.recv())
                self._events.put(ShardComputed(worker=worker, shard=shard, result=result))
        except (EOFError, OSError):
            self._events.put(WorkerGone(worker=worker, reason=self._reason(worker)))
        except Exception as error:  # noqa: BLE001 - the worker sent it
            self._events.put(WorkFailed(worker=worker, error=error))

    def _reason(self, worker: WorkerId) -> str:
        process = self._workers.get(worker)
        return "it was killed" if process is None else process.reason()
