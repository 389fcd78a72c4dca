"""Runs programs in forks of a process that has imported TensorFlow, which takes longer than most of what tests run.

A test opts in with the environment of `testkit.preloading`. `sitecustomize` then calls `handover.hand_over` in every
Python: the server of this module forks, and the fork runs the program with the arguments, the environment, the folder
and the standard streams that were meant for it. The process that handed over forwards signals to the fork and ends as
the fork ends. If it is killed, the fork is killed a moment later, before the next program starts, so that what it held
is free then; a supervisor's task ends so with its supervisor.
A fork has the name of the process that handed over, so that a test finds it (`testkit.preloading.fork_of`). Programs
whose memory is measured, those whose memory addresses must differ, supervisors, whose children tests look for, and
those that signal their group of processes, which is that of the tests here, start by themselves.

There are two servers. That of inspections has not imported TensorFlow, as the process of an inspection does not. Each
imports with the first program that it is given.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib
import marshal
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from handover import FORK_NAME, INSPECTION, NAMESPACES  # type: ignore[import-not-found] # beside this file

_MODULES = (
    *("tensorflow", "keras", "grpc.aio", "uvicorn", "sklearn.datasets", "pytest"),
    *(
        f"understudy.{each}"
        for each in ("cli.train", "cli.serve", "trainer.training", "evaluator.assembly.components", "service.server")
    ),
)
_REQUEST_BYTES = 1 << 20
_CREDENTIALS = struct.Struct("3i")


class Server:
    """Forks for every connection. It has one thread, as a fork takes no other with it.

    Args:
        listener: The socket that it listens to.
        import_all: Imports what the programs need. Called before each fork.
    """

    def __init__(self, listener: socket.socket, import_all: Callable[[], None]) -> None:
        self._listener = listener
        self._import_all = import_all
        self._selector = selectors.DefaultSelector()
        self._forks: dict[int, socket.socket] = {}
        self._killed: set[int] = set()

    def serve(self) -> None:
        """Serve until standard input ends; kill the forks then."""
        woken, wakes = socket.socketpair()
        woken.setblocking(False)
        wakes.setblocking(False)
        signal.set_wakeup_fd(wakes.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests end this process
        self._selector.register(sys.stdin, selectors.EVENT_READ)
        self._selector.register(woken, selectors.EVENT_READ, lambda: self._reap(woken))
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        while True:
            ready = [key for key, _ in self._selector.select()]
            for key in sorted(ready, key=lambda key: key.fileobj is self._listener):  # signals before new programs
                if key.data is None:
                    for pid in self._forks:
                        os.kill(pid, signal.SIGKILL)
                    signal.set_wakeup_fd(-1)
                    return
                key.data()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        data, files, _, _ = socket.recv_fds(connection, _REQUEST_BYTES, 3 + len(NAMESPACES))
        if not data:
            connection.close()
            return
        self._import_all()
        for killed in [*self._killed]:
            self._ended(*os.waitpid(killed, 0))
        came_from, _, _ = _CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        pid = os.fork()
        if pid == 0:
            Path("/proc/self/comm").write_text(FORK_NAME.format(came_from))
            self._selector.close()
            for each in (self._listener, connection, *self._forks.values()):
                each.close()
            _run(marshal.loads(data), files)  # noqa: S302 - a test sent it
        for file in files:
            os.close(file)
        self._forks[pid] = connection
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._forward(pid, connection))

    def _forward(self, pid: int, connection: socket.socket) -> None:
        """Send a signal that came over the connection, or SIGKILL if its other end is gone."""
        if pid not in self._forks:  # it has ended since this event came
            return
        came = b""
        with suppress(ConnectionError):
            came = connection.recv(1)
        if not came:
            self._selector.unregister(connection)
            self._killed.add(pid)
        os.kill(pid, came[0] if came else signal.SIGKILL)

    def _reap(self, woken: socket.socket) -> None:
        woken.recv(4096)
        while self._forks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            self._ended(pid, status)

    def _ended(self, pid: int, status: int) -> None:
        """Say how a fork has ended, if the other end is still there, and forget it."""
        self._killed.discard(pid)
        connection = self._forks.pop(pid)
        with suppress(KeyError):
            self._selector.unregister(connection)
        with suppress(OSError):
            connection.send(str(os.waitstatus_to_exitcode(status)).encode())
        connection.close()


@functools.cache
def _import_all() -> None:
    """Import what programs import, and never collect it."""
    gc.disable()
    for name in _MODULES:
        importlib.import_module(name)
    gc.enable()
    gc.freeze()


@functools.cache
def _import_inspection() -> None:
    """Import what inspections import, with one thread, and without TensorFlow."""
    os.environ.update(dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
    worker = importlib.import_module(INSPECTION[-1])
    worker.prepare()
    for each in (worker.__name__, "tensorflow"):  # the worker runs as __main__, and prepares itself
        del sys.modules[each]
    gc.freeze()


def _run(request: dict[str, Any], files: list[int]) -> NoReturn:
    """Run a program in this fork, and end with its status."""
    status = 1
    try:
        _prepare(request, files)
        status = _status_of(request["program"])
    except BaseException:  # noqa: BLE001 - Python prints whatever ends a program
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _prepare(request: dict[str, Any], files: list[int]) -> None:
    import numpy as np

    streams, namespaces = files[:3], files[3:]
    _enter(namespaces)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # this one's TMPDIR counts
    os.chdir(request["folder"])
    wanted = request["environment"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [folder for folder in wanted if folder and folder not in sys.path]
    np.random.seed()  # noqa: NPY002 - else all forks draw the same numbers


def _enter(namespaces: list[int]) -> None:
    """Move to some namespaces, unless this process is there already."""
    for descriptor, own in zip(namespaces, NAMESPACES, strict=True):
        if not os.path.samestat(os.fstat(descriptor), Path(own).stat()) and ctypes.CDLL(None).setns(descriptor, 0):
            raise OSError(f"cannot enter the namespace of the program that {own} is")
        os.close(descriptor)


def _status_of(program: list[str]) -> int:
    """Run a program as Python does, and return its exit status."""
    first, *arguments = program[1:] if program[0] == "-P" else program
    try:
        if first == "-m":
            sys.argv = ["-m", *arguments[1:]]
            if program[0] == "-m":
                sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        elif first == "-c":
            sys.argv = ["-c", *arguments[1:]]
            sys.path.insert(0, "")
            sys.modules["__main__"] = main = ModuleType("__main__")
            exec(compile(arguments[0], "<string>", "exec"), main.__dict__)  # noqa: S102 - as Python does
        else:
            sys.argv = program
            sys.path.insert(0, str(Path(first).resolve().parent))
            runpy.run_path(first, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for the threads, as Python does
        atexit._run_exitfuncs()
    return 0


def main(programs: int, inspections: int) -> None:
    """Serve at two listening sockets, which this process has inherited, in a process each."""
    with socket.socket(fileno=programs) as listener, socket.socket(fileno=inspections) as other:
        pid = os.fork()
        if pid == 0:
            listener.close()
            Server(other, _import_inspection).serve()
            return
        other.close()
        Server(listener, _import_all).serve()
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
