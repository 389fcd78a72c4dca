"""Runs the fenced examples of a Markdown page in order, as a reader would.

A page is one session in one folder:

- ``python`` and ``toml`` blocks with a ``title`` are files of that name;
- other ``python`` blocks are separate programs;
- ``sh`` blocks are run by bash, which stops at the first command that fails;
- an ``sh`` block titled ``In the background`` keeps running until the page ends; ``understudy serve`` in it has printed
  READY before the next block runs;
- an ``sh`` block whose title begins with ``Needs`` names what a test machine lacks; bash only parses it;
- blocks in other languages are for reading.

The documented ports are replaced by free ones. A `PYTHONPATH` of a block comes before that of the tests, by which
programs start quickly.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Thread
from typing import Self

from testkit.preloading import preloaded

GRPC_PORT = 8500
HTTP_PORT = 8501
PATIENCE_SECONDS = 200
END_SECONDS = 100
BASH = "/bin/bash"

_FENCE = re.compile(
    r"^```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True)
class Example:
    """One fenced block: its language, its title ("" if it has none) and its text."""

    language: str
    title: str
    code: str

    @property
    def is_file(self) -> bool:
        return self.language in {"python", "toml"} and bool(self.title)

    @property
    def is_background(self) -> bool:
        return self.language == "sh" and self.title == "In the background"

    @property
    def needs(self) -> str:
        """The missing requirement of the test machine, or an empty string."""
        return self.title.removeprefix("Needs ") if self.language == "sh" and self.title.startswith("Needs ") else ""

    @property
    def is_run(self) -> bool:
        return self.language in {"python", "sh"} and not self.is_file and not self.needs


def examples_of(page: Path) -> list[Example]:
    """Return the fenced blocks of a page in order."""
    found = _FENCE.finditer(page.read_text(encoding="utf-8"))
    return [Example(match["language"], match["title"] or "", match["code"]) for match in found]


class Session:
    """Runs examples in one folder.

    Args:
        folder: Where the commands run and files are written.
        ports: The free port for each documented one.
    """

    def __init__(self, folder: Path, ports: Mapping[int, int]) -> None:
        self._folder = folder
        self._ports = ports
        self._background = ExitStack()
        scripts = Path(sys.executable).parent
        self._environment = {
            **os.environ,
            **preloaded(),
            "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
            "UNDERSTUDY_GRPC_PORT": str(ports[GRPC_PORT]),
            "UNDERSTUDY_HTTP_PORT": str(ports[HTTP_PORT]),
            "UNDERSTUDY_TARGET": f"127.0.0.1:{ports[GRPC_PORT]}",
            "XDG_STATE_HOME": str(folder / "state"),
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._background.close()

    def run(self, example: Example) -> None:
        """Run one example, write it if it is a file, or parse it if the machine lacks a requirement.

        Raises:
            AssertionError: It failed or took too long. The text holds the example and its output.
        """
        code = self._adapted(example.code)
        if example.is_file:
            (self._folder / example.title).write_text(code, encoding="utf-8")
        elif example.is_background:
            program = self._background.enter_context(self._started(BASH, "-euo", "pipefail", "-c", code))
            program.await_line("READY")
        elif example.is_run and example.language == "python":
            self._finish(example, sys.executable, "-c", code)
        elif example.is_run:
            self._finish(example, BASH, "-euo", "pipefail", "-c", code)
        elif example.needs:
            self._finish(example, BASH, "-n", "-c", code)

    def _finish(self, example: Example, *command: str) -> None:
        with self._started(*command) as program:
            status = program.wait()
            assert status == 0, f"exit status {status} of\n{example.code}\n{program.output}"

    def _adapted(self, code: str) -> str:
        for documented, free in self._ports.items():
            code = code.replace(f":{documented}", f":{free}")
        return re.sub(r"^PYTHONPATH=\S+", r"\g<0>:$PYTHONPATH", code, flags=re.MULTILINE)

    @contextmanager
    def _started(self, *command: str) -> Iterator[_Program]:
        """Start a program in its own process group; end the group on exit."""
        process = subprocess.Popen(
            command,
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        program = _Program(process)
        try:
            yield program
        finally:
            program.end()


class _Program:
    """A running program whose output a thread reads, so that it never blocks on a full pipe."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._lines: list[str] = []
        self._changed = Condition()
        self._ended = False
        self._thread = Thread(target=self._read)
        self._thread.start()

    @property
    def output(self) -> str:
        with self._changed:
            return "".join(self._lines)

    def await_line(self, beginning: str) -> None:
        """Wait until it has printed a line with this beginning."""

        def seen() -> bool:
            return any(line.startswith(beginning) for line in self._lines)

        with self._changed:
            self._changed.wait_for(lambda: self._ended or seen(), PATIENCE_SECONDS)
            assert seen(), f"no line began with {beginning}:\n{''.join(self._lines)}"

    def wait(self) -> int | None:
        """Return its exit status, or None if it still runs when the time is up."""
        try:
            return self._process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> None:
        """End it and its children."""
        for each in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, each)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
        self._thread.join(END_SECONDS)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self._lines.append(line)
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()
