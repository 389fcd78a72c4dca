"""``understudy serve`` as a process, and the lines that it prints."""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

from testkit.preloading import preloaded

START_SECONDS = 120.0

_GRPC = re.compile(r"grpc=(\S+)")


def start(folder: Path, *options: str, is_fork: bool = True) -> subprocess.Popen[str]:
    """Start a server on free ports; its log is ``serve.log`` in a folder.

    A fork of a process that has imported TensorFlow starts sooner; its memory is not that of a server of its own.
    """
    settings = ["--grpc-port=0", "--http-port=0", "--logical-cpus=2", "--poll-interval-seconds=0.05"]
    with (folder / "serve.log").open("a") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "understudy.cli", "serve", *options, *settings],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **(preloaded() if is_fork else {}), "TF_CPP_MIN_LOG_LEVEL": "2"},
        )


class Program:
    """A server that listens.

    Attributes:
        grpc: Its gRPC address.
    """

    def __init__(self, folder: Path, *options: str, is_fork: bool = True) -> None:
        self._process = start(folder, *options, is_fork=is_fork)
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, name="lines-of-server")
        self._reader.start()
        try:
            found = _GRPC.search(self.wait_for("LISTENING"))
            assert found is not None
        except BaseException:
            self.kill()
            raise
        self.grpc = found[1]

    @property
    def process_id(self) -> int:
        """The id of its process."""
        return self._process.pid

    def wait_for(self, word: str) -> str:
        """Wait until it prints a line that begins with a word, and return the line."""
        until = time.monotonic() + START_SECONDS
        while not (line := self._lines.get(timeout=max(0.0, until - time.monotonic()))).startswith(word):
            pass
        return line

    def wait(self) -> int:
        """Wait until it has ended by itself; return its exit status."""
        return self._process.wait(START_SECONDS)

    def kill(self) -> None:
        """End it by SIGKILL."""
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
