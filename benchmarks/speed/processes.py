"""A server as a tree of processes: start, usage, pause, and end."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

END_SECONDS = 10.0
"""How long a server may take to end before it is killed."""

LIFETIME_SECONDS = 3600
"""The longest life of a server, in case no process is left to end it."""

_MIB = 2**20


class BenchmarkError(Exception):
    """The measurement failed, or its result cannot be trusted. The text gives the reason and the remedy."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How to start a process: a program with its arguments, and additions to the environment."""

    command: Sequence[str]
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a tree of processes has used: CPU time since its start, and resident memory now."""

    cpu_seconds: float
    rss_mib: float

    def since(self, before: Usage) -> Usage:
        """Return the CPU time since an earlier usage, and the memory of this one."""
        return Usage(cpu_seconds=self.cpu_seconds - before.cpu_seconds, rss_mib=self.rss_mib)


class ProcessTree:
    """A process and its descendants, which end with this context.

    Its output goes to the file ``log``; with ``stdin``, there are a pipe to it and one from it instead.
    """

    def __init__(self, name: str, launch: Launch, *, log: Path, stdin: bool = False) -> None:
        self.name = name
        self._log = log
        environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1", **launch.environ}
        with log.open("ab") as output:
            self.popen = subprocess.Popen(
                (_timeout(), f"--kill-after={END_SECONDS}", str(LIFETIME_SECONDS), *launch.command),
                env=environ,
                stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
                stdout=subprocess.PIPE if stdin else output,
                stderr=output,
                text=True,
                start_new_session=True,
            )

    def usage(self) -> Usage:
        """Return the tree's usage."""
        cpu = rss = 0.0
        for process in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                cpu += times.user + times.system
                rss += process.memory_info().rss / _MIB
        return Usage(cpu_seconds=cpu, rss_mib=rss)

    def check_alive(self) -> None:
        """Raise BenchmarkError, with the end of its output, if it has ended."""
        if self.popen.poll() is not None:
            last = self._log.read_text(errors="replace")[-1500:]
            raise BenchmarkError(f"{self.name} ended with {self.popen.returncode}; it printed: {last}")

    def pause(self) -> None:
        """Pause the tree until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue the tree."""
        self._signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """Terminate the tree, and kill what is left of it after `END_SECONDS`."""
        tree = self._tree()
        self.resume()
        if self.popen.poll() is None:
            self.popen.terminate()
        _, left = psutil.wait_procs(tree, timeout=END_SECONDS)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.popen.wait(END_SECONDS)
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _tree(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self.popen.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _signal(self, number: signal.Signals) -> None:
        for process in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def _timeout() -> str:
    """Return the program that limits another one's time."""
    found = shutil.which("timeout")
    if found is None:
        raise BenchmarkError("there is no timeout on PATH; it is one of the GNU core utilities")
    return found


def free_port() -> int:
    """Return a free port on this machine."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
    return port


def at_rest_cpu(processes: Sequence[ProcessTree], *, seconds: float = 1.0) -> dict[str, float]:
    """Return the share of one core that each tree uses while idle."""
    before = [process.usage().cpu_seconds for process in processes]
    time.sleep(seconds)
    return {
        process.name: (process.usage().cpu_seconds - began) / seconds
        for process, began in zip(processes, before, strict=True)
    }
