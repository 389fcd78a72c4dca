"""Starts processes, reads their output, and stops them all at the end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

import click

LineListener = Callable[[str], None]

_LOG_POLL_SECONDS = 0.05

_FIRST_OTHER_FILE = 3
"""The first file descriptor after those of standard input, output and error."""

_END_WITH_PARENT = """
import ctypes, os, sys
PR_SET_PDEATHSIG, SIGKILL = 1, 9
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
if os.getppid() == int(sys.argv[1]):  # else the parent ended before
    os.execv(sys.argv[2], sys.argv[2:])
"""
"""Runs another program that the system kills when the process that started it ends."""


def own_command() -> list[str]:
    """Return the command line of this process."""
    return [sys.executable, "-m", "understudy.cli", *sys.argv[1:]]


def start_again() -> NoReturn:
    """Replace this program by a new start of it, in the same process. Does not return.

    Files and sockets but for standard input, output and error are closed, whatever opened them.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    sys.stdout.flush()
    sys.stderr.flush()
    os.closerange(_FIRST_OTHER_FILE, os.sysconf("SC_OPEN_MAX"))
    os.execv(sys.executable, own_command())  # noqa: S606 - it starts without a shell on purpose


def exit_at_once(failure: click.ClickException | None) -> NoReturn:
    """End the process without the shutdown of libraries, which may wait for others or for their own threads."""
    if failure is not None:
        failure.show()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if failure is None else failure.exit_code)


class ChildProcess:
    """A child process that writes to a log file, whose lines go to a listener.

    It writes to the file itself, so it can outlive this process, and Ctrl-C reaches only this process. Create it on the
    main thread if it should end with this process.

    Args:
        name: The name for messages.
        arguments: The command line after the Python interpreter.
        log: The file that receives its output.
        environment: Variables on top of this process's own.
        on_line: Called with every line, on the reading thread.
        ends_with_parent: Whether the system kills it when this process ends, however it ends. Only Linux can.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
        on_line: LineListener | None = None,
        ends_with_parent: bool = False,
    ) -> None:
        self.name = name
        self.log = log
        self._on_line = on_line
        self._changed = threading.Condition()
        self._lines: list[str] = []
        self._over = False
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*(_ending_with_parent() if ends_with_parent else ()), sys.executable, *arguments],
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._follow_log, name=f"read-{name}", daemon=True)
        self._reader.start()

    def _follow_log(self) -> None:
        with self.log.open(encoding="utf-8", errors="replace") as log:
            partial = ""
            while True:
                ended = self.ended
                while piece := log.readline():
                    partial += piece
                    if partial.endswith("\n"):
                        self._take(partial.rstrip("\n"))
                        partial = ""
                if ended:
                    break
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_LOG_POLL_SECONDS)
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _take(self, line: str) -> None:
        with self._changed:
            self._lines.append(line)
            self._changed.notify_all()
        if self._on_line is not None:
            self._on_line(line)

    def wait_for_line(self, pattern: str, *, timeout_seconds: float) -> re.Match[str]:
        """Wait until a line matches; raise click.ClickException if the process ends or time runs out first."""
        seen = 0
        found: re.Match[str] | None = None

        def matched_or_over() -> bool:
            nonlocal seen, found
            while found is None and seen < len(self._lines):
                found = re.search(pattern, self._lines[seen])
                seen += 1
            return found is not None or self._over

        with self._changed:
            self._changed.wait_for(matched_or_over, timeout_seconds)
        if found is None:
            what = "ended" if self._over else f"was silent for {timeout_seconds:.0f} s"
            raise self.failure(f"{what} before it said {pattern!r}")
        return found

    def wait(self, *, timeout_seconds: float) -> None:
        """Wait for it to end with 0; raise click.ClickException if it does not."""
        try:
            code = self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            raise self.failure(f"did not end within {timeout_seconds:.0f} s") from None
        if code != 0:
            raise self.failure(f"ended with exit status {code}")

    @property
    def ended(self) -> bool:
        """Whether the process is over."""
        return self._process.poll() is not None

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def failure(self, what: str) -> click.ClickException:
        """Return an error with the last lines that the process printed."""
        with self._changed:
            tail = "\n".join(f"    {line}" for line in self._lines[-8:])
        return click.ClickException(f"{self.name} {what}. Its log is {self.log}; the last lines:\n{tail}")

    def stop(self, *, timeout_seconds: float = 30) -> int:
        """Terminate it, kill it after ``timeout_seconds``, and return its exit status."""
        if not self.ended:
            self._process.terminate()
        try:
            code = self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._reader.join(timeout_seconds)
        return code


def _ending_with_parent() -> Sequence[str]:
    """Return the beginning of a command line, before the program."""
    return (sys.executable, "-S", "-c", _END_WITH_PARENT, str(os.getpid())) if sys.platform == "linux" else ()


class ProcessGroup:
    """Processes that are stopped together, in the reverse order of their start, even after an error."""

    def __init__(self) -> None:
        self._processes: list[ChildProcess] = []

    def add(self, process: ChildProcess) -> ChildProcess:
        """Add a process."""
        self._processes.append(process)
        return process

    def release(self, process: ChildProcess) -> None:
        """Release a process, which then outlives the group."""
        self._processes.remove(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in reversed(self._processes):
            process.stop()
