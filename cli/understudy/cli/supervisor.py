"""Restarts a task after a failure that a restart can fix: ``understudy run --restarts N``."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

import click

from understudy.checkpoints.pauses import doubling_pause
from understudy.trainer.trainer_errors import MENDED_BY_RESTART, RESTART_COUNT

RESTARTABLE = tuple(error.exit_code for error in MENDED_BY_RESTART)
"""The exit statuses after which a task is started again."""

_PID = "UNDERSTUDY_SUPERVISOR_PID"
_PR_SET_PDEATHSIG = 1
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 30.0
_SIGNALLED = 128


def is_supervised(environ: Mapping[str, str]) -> bool:
    """Whether this process was started by a `Supervisor`."""
    return RESTART_COUNT in environ


def end_with_supervisor(environ: Mapping[str, str]) -> None:
    """Let the kernel kill this process when its supervisor dies, if it has one. Linux only.

    Otherwise the task of a killed supervisor would keep running, and conflict with its replacement.
    """
    if _PID not in environ or sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(environ[_PID]):
        # The supervisor died before the call.
        os.kill(os.getpid(), signal.SIGKILL)


class Supervisor:
    """Runs a command in a child process until its final exit.

    It restarts the child after a fatal signal, after its cluster lost a task or did not form, and after a SIGTERM that
    only the child received. A SIGTERM to this process is forwarded to the child, which is then not restarted.

    Args:
        command: The command line.
        restarts: The maximum number of restarts.
    """

    def __init__(self, command: Sequence[str], *, restarts: int) -> None:
        self._command = list(command)
        self._restarts = restarts
        self._child: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()

    def run(self) -> int:
        """Return the child's last exit status, in a shell's convention. Call it on the main thread."""
        with self._terminations_passed_on():
            count = 0
            while True:
                status = self._run_once(count)
                if count == self._restarts or self._stopping.is_set() or not _is_restartable(status):
                    break
                pause = doubling_pause(count, first=_FIRST_PAUSE_SECONDS, longest=_LONGEST_PAUSE_SECONDS)
                count += 1
                click.echo(
                    f"the task ended with {status}; starting it again in {pause:g} s ({count} of {self._restarts})",
                    err=True,
                )
                if self._stopping.wait(pause):
                    break
        return status if status >= 0 else _SIGNALLED - status

    def _run_once(self, count: int) -> int:
        environ = {**os.environ, RESTART_COUNT: str(count), _PID: str(os.getpid())}
        self._child = subprocess.Popen(self._command, env=environ)
        if self._stopping.is_set():
            # SIGTERM arrived during the start.
            self._child.terminate()
        try:
            return self._child.wait()
        except KeyboardInterrupt:
            self._stopping.set()
            # The terminal sent it to the child as well.
            return self._child.wait()

    @contextmanager
    def _terminations_passed_on(self) -> Iterator[None]:
        previous = signal.signal(signal.SIGTERM, self._terminate)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, previous)

    def _terminate(self, signum: int, frame: FrameType | None) -> None:
        del signum, frame
        self._stopping.set()
        if self._child is not None:
            self._child.terminate()


def _is_restartable(status: int) -> bool:
    return status < 0 or status in RESTARTABLE
