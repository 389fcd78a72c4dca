"""Has files inspected by other processes."""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, cast

from understudy.checkpoints.checkpoint_errors import DamagedCheckpointError
from understudy.checkpoints.inspection import bounds
from understudy.checkpoints.inspection.limits import limits_for
from understudy.checkpoints.kinds import ModelKind

_START_SECONDS = 10
_BYTES_PER_SECOND = 10_000_000
"""The slowest read rate, in CPU time, before the read times out."""
_PATIENCE = 15
"""How much longer than its CPU time a read may take, as the machine may be busy."""

_IDLE_WORKERS = 2
_KILLED = "the process that read it was killed, as happens when memory runs out"
_SENT_BY_OTHERS = (signal.SIGKILL, signal.SIGTERM)
"""Signals that no file causes: from an operator, a scheduler or the out-of-memory killer."""
_TOO_BUSY = "the process that read it had too little processor time"
_WORKER = "understudy.checkpoints.inspection.worker"
_SINGLE_THREADED = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def inspect_structure(kind: ModelKind, path: Path) -> Mapping[str, Any]:
    """Check that a model's files stay within the bounds and refer to no other files.

    Args:
        kind: How the model is stored.
        path: The model's `ModelKind.file_name` in its folder.

    Returns:
        For a SavedModel, ``operations``, ``restoring`` and ``problems``; see
        `understudy.checkpoints.inspection.graph.inspect_saved_model`.

    Raises:
        DamagedCheckpointError: They do not. The text names the file and the reason.
        TimeoutError: The machine is too busy to read it, which says nothing about it.
        OSError: The file could not be read, for another reason of this machine.
    """
    return _POOL.inspect(kind, path, content=False)


def inspect_content(kind: ModelKind, path: Path) -> Mapping[str, Any]:
    """Check a model's files and read them: ``digest`` and ``iterations``, for formats of HDF5. See `inspect_structure`.

    A temporary file beside a ``.keras`` file is needed if its weights are compressed.
    """
    return _POOL.inspect(kind, path, content=True)


class _Pool:
    """Processes that inspect files, each one at a time. Thread-safe. They end when this process does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []

    def inspect(self, kind: ModelKind, path: Path, *, content: bool) -> Mapping[str, Any]:
        size = _size_of(kind, path)
        seconds = _START_SECONDS + size // _BYTES_PER_SECOND
        written = bounds.largest_content(size) if kind is ModelKind.KERAS else 0
        request = {
            "kind": kind.value,
            "path": str(path),
            "content": content,
            "limits": limits_for(size, seconds=seconds, written_bytes=written),
        }
        worker = self._borrow()
        try:
            answer = worker.ask(request, _PATIENCE * seconds)
        except BaseException:
            worker.close()
            raise
        self._return(worker)
        return _found(answer, kind, path)

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.close()

    def _borrow(self) -> _Worker:
        with self._lock:
            while self._idle:
                worker = self._idle.pop()
                if worker.is_usable():
                    return worker
                worker.close()
        return _Worker()

    def _return(self, worker: _Worker) -> None:
        with self._lock:
            if len(self._idle) < _IDLE_WORKERS:
                self._idle.append(worker)
                return
        worker.close()


class _Worker:
    """One process."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **_SINGLE_THREADED},
        )
        self._requests = cast("IO[bytes]", self._process.stdin)
        self._answers = cast("IO[bytes]", self._process.stdout)

    def is_usable(self) -> bool:
        """Return whether it runs, and belongs to this process rather than to the one that this was forked from."""
        return self._owner == os.getpid() and self._process.poll() is None

    def ask(self, request: Mapping[str, Any], timeout_seconds: float) -> Mapping[str, Any]:
        """Return the answer to a request; raise OSError if there is none in time."""
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self._process.kill()

        watchdog = threading.Timer(timeout_seconds, give_up)
        watchdog.start()
        try:
            self._requests.write(json.dumps(request).encode() + b"\n")
            self._requests.flush()
            answer = self._answers.readline()
        except BrokenPipeError:
            answer = b""
        finally:
            watchdog.cancel()
            watchdog.join()
        if not answer and late.is_set():
            raise TimeoutError(errno.ETIMEDOUT, _TOO_BUSY, request["path"])
        if not answer:
            raise OSError(errno.ENOMEM, _KILLED, request["path"])
        return dict(json.loads(answer))

    def close(self) -> None:
        """End the process."""
        if self._owner != os.getpid():
            return
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        self._answers.close()
        self._process.wait()


def _size_of(kind: ModelKind, path: Path) -> int:
    """Return the bytes of the files that are inspected."""
    if kind is ModelKind.TF_CHECKPOINT:
        return sum(file.stat().st_size for file in path.parent.glob(f"{path.name}.index"))
    if kind is ModelKind.SAVED_MODEL:
        return sum(file.stat().st_size for file in (*path.glob("*.pb"), *path.glob("variables/*.index")))
    return path.stat().st_size


def _found(answer: Mapping[str, Any], kind: ModelKind, path: Path) -> Mapping[str, Any]:
    if "found" in answer:
        return dict(answer["found"])
    if "machine" in answer:
        number, text = answer["machine"]
        raise OSError(number, text, str(path))
    if answer.get("signal") == signal.SIGALRM:
        raise TimeoutError(errno.ETIMEDOUT, _TOO_BUSY, str(path))
    if answer.get("signal") in _SENT_BY_OTHERS:
        raise OSError(errno.ENOMEM, _KILLED, str(path))
    reason = answer.get("damage") or f"reading it was ended by signal {answer['signal']}"
    raise DamagedCheckpointError(f"{path.name} is not a whole {_DESCRIPTIONS[kind]}: {reason}")


_DESCRIPTIONS = {
    ModelKind.KERAS: ".keras file",
    ModelKind.WEIGHTS: ".weights.h5 file",
    ModelKind.HDF5: ".h5 file",
    ModelKind.TF_CHECKPOINT: "TensorFlow checkpoint",
    ModelKind.SAVED_MODEL: "SavedModel",
}

_POOL = _Pool()
atexit.register(_POOL.close)
