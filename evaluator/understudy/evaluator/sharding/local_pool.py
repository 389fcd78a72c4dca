"""A pool of processes on this machine."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import IO, Any

from understudy.evaluator.evaluator_errors import first_line
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

_MODULE = "understudy.evaluator.sharding.local_worker"
_LAST_WORDS = 2000
_JOIN_SECONDS = 10.0


class LocalPool:
    """See `understudy.evaluator.sharding.pool.WorkerPool`. Each worker is a process with a model of its own.

    A thread for each worker receives its results, so that one that stops in the middle of a message blocks no other.
    A worker ends when this process does.

    Args:
        work: What the workers compute.
        workers: The number of processes.
    """

    def __init__(self, work: Work, *, workers: int) -> None:
        self._work = work
        self.capacity = workers
        self._ids = itertools.count()
        self._workers: dict[WorkerId, _Process] = {}
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()

    @property
    def process_ids(self) -> Sequence[int]:
        """The ids of the processes that run, the oldest first."""
        return [process.popen.pid for process in list(self._workers.values())]

    def start_worker(self) -> WorkerId:
        """See `WorkerPool`."""
        worker = next(self._ids)
        ours, theirs = socket.socketpair()
        with theirs:
            words = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
            popen = subprocess.Popen(
                [sys.executable, "-m", _MODULE],
                stdin=theirs.fileno(),
                stdout=words,
                stderr=words,
                env={**os.environ, "PYTHONSAFEPATH": "1"},  # modules in this folder are not the program's own
            )
        connection: Connection[Any, Any] = Connection(ours.detach())
        thread = threading.Thread(target=self._receive, args=(worker, connection), name=f"understudy-worker-{worker}")
        self._workers[worker] = _Process(popen=popen, connection=connection, thread=thread, words=words)
        with contextlib.suppress(OSError):  # the thread finds that the process has ended
            connection.send(self._work)
        thread.start()
        return worker

    def submit(self, worker: WorkerId, shard: Shard) -> None:
        """See `WorkerPool`."""
        with contextlib.suppress(OSError):
            self._workers[worker].connection.send(shard)

    def kill(self, worker: WorkerId) -> None:
        """See `WorkerPool`."""
        process = self._workers.pop(worker, None)
        if process is None:
            return
        process.popen.kill()
        process.popen.wait(_JOIN_SECONDS)
        process.thread.join(_JOIN_SECONDS)
        process.connection.close()
        process.words.close()

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
            process.popen.kill()  # all at once; then wait for each
        for worker in list(self._workers):
            self.kill(worker)

    def _receive(self, worker: WorkerId, connection: Connection[Any, Any]) -> None:
        try:
            self._events.put(WorkerReady(worker=worker, facts=_checked(connection.recv())))
            while True:
                shard, result = _checked(connection.recv())
                self._events.put(ShardComputed(worker=worker, shard=shard, result=result))
        except (EOFError, OSError):
            self._events.put(WorkerGone(worker=worker, reason=self._reason(worker)))
        except Exception as error:  # noqa: BLE001 - the worker sent it
            self._events.put(WorkFailed(worker=worker, error=error))

    def _reason(self, worker: WorkerId) -> str:
        process = self._workers.get(worker)
        if process is None:
            return "it was killed"
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.popen.wait(_JOIN_SECONDS)
        return f"process {process.popen.pid} ended with status {process.popen.returncode}: {_last_line(process.words)}"


@dataclass(frozen=True, kw_only=True)
class _Process:
    popen: subprocess.Popen[bytes]
    connection: Connection[Any, Any]
    thread: threading.Thread
    words: IO[bytes]


def _checked(message: Any) -> Any:
    if isinstance(message, Exception):
        raise message
    return message


def _last_line(words: IO[bytes]) -> str:
    """Return the last line that a process has written."""
    try:
        words.seek(0, 2)
        words.seek(max(0, words.tell() - _LAST_WORDS))
        lines = words.read().decode(errors="replace").strip().splitlines()
    except (OSError, ValueError) as error:  # it was closed meanwhile
        return first_line(error)
    return lines[-1] if lines else "it wrote nothing"
