"""A Python process that this one talks to through a socket, its standard input."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from understudy.compat.error_texts import first_line

_LAST_WORDS = 2000
_JOIN_SECONDS = 10.0


class ChildProcess:
    """Runs a module. For one thread, except for what its own thread calls: `reason`.

    A thread receives its messages, so that one that stops in the middle of a message blocks no other. The process has
    to end when it finds its socket closed, as it does when this process dies.

    Args:
        module: The module.
        name: The name of the thread.
        receive: Called on the thread with the socket; returns or raises EOFError or OSError once that is closed.
        temporary: The folder of its temporary files, which stay there if it is killed; that of this process by default.
    """

    def __init__(
        self,
        module: str,
        *,
        name: str,
        receive: Callable[[Connection[Any, Any]], None],
        temporary: Path | None = None,
    ) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._words: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
            self._popen = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=theirs.fileno(),
                stdout=self._words,
                stderr=self._words,
                env={
                    **os.environ,
                    "PYTHONSAFEPATH": "1",  # modules in this folder are not the program's own
                    **({} if temporary is None else {"TMPDIR": str(temporary)}),
                },
            )
        self._connection: Connection[Any, Any] = Connection(ours.detach())
        self._thread = threading.Thread(target=receive, args=(self._connection,), name=name)

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._popen.pid

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def send(self, message: Any) -> None:
        """Send a message. If the process has ended, the thread finds that out."""
        with contextlib.suppress(OSError):
            self._connection.send(message)

    def kill_soon(self) -> None:
        """Kill the process without waiting for its end."""
        self._popen.kill()

    def kill(self) -> None:
        """Kill the process, and join the thread. Idempotent."""
        self.end(0.0)

    def end(self, timeout_seconds: float) -> None:
        """Wait until the process has ended by itself, kill it after the timeout, and join the thread. Idempotent."""
        if self._connection.closed:
            return
        try:
            self._popen.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait(_JOIN_SECONDS)
        if self._thread.ident is not None:
            self._thread.join(_JOIN_SECONDS)
        self._connection.close()
        self._words.close()

    def reason(self) -> str:
        """Return how the process ended, and the last line that it has written. Waits for its end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(_JOIN_SECONDS)
        return f"process {self._popen.pid} ended with status {self._popen.returncode}: {_last_line(self._words)}"


def checked(message: Any) -> Any:
    """Return a message; raise it if it is an exception."""
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
