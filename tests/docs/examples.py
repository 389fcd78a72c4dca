"""Runs the fenced examples of a Markdown page in order, as a reader would.

A page is one session in one folder:

- ``python`` and ``toml`` blocks with a ``title`` are files of that name;
- other ``python`` blocks are programs of their own;
- ``sh`` blocks are run by bash, which stops at the first command that fails;
- an ``sh`` block titled ``In the background`` keeps running until the page ends; ``understudy serve`` in it has printed
  READY before the next block runs;
- an ``sh`` block whose title begins with ``Needs`` names what a test machine lacks; bash only parses it;
- blocks in other languages are for reading.

The documented ports are replaced by free ones.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import IO, Self

GRPC_PORT = 8500
HTTP_PORT = 8501
PATIENCE_SECONDS = 100
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
        """What a test machine lacks to run it, or nothing."""
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

    def run(self, example: Example) -> str:
        """Run one example; return what it printed.

        Raises:
            AssertionError: It failed or took too long. The text holds the example and its output.
        """
        if example.language not in {"python", "sh", "toml"}:
            return ""
        code = self._with_free_ports(example.code)
        if example.is_file:
            (self._folder / example.title).write_text(code, encoding="utf-8")
            return ""
        if example.is_background:
            self._background.enter_context(self._running(code))
            return ""
        command = (
            [sys.executable, "-c", code] if example.language == "python" else [BASH, "-euo", "pipefail", "-c", code]
        )
        if example.needs:
            command = [BASH, "-n", "-c", code]
        finished = subprocess.run(
            command,
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
        assert finished.returncode == 0, f"exit status {finished.returncode} of\n{example.code}\n{finished.stdout}"
        return finished.stdout

    def _with_free_ports(self, code: str) -> str:
        for documented, free in self._ports.items():
            code = code.replace(f":{documented}", f":{free}")
        return code

    @contextmanager
    def _running(self, code: str) -> Iterator[None]:
        process = subprocess.Popen(
            [BASH, "-euo", "pipefail", "-c", code],
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        output = _Output(process.stdout)
        try:
            output.await_line("READY", PATIENCE_SECONDS)
            yield
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(PATIENCE_SECONDS)
            output.close()


class _Output:
    """Reads what a background process prints, so that it never blocks on a full pipe."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._lines: list[str] = []
        self._seen = Event()
        self._wanted = ""
        self._thread = Thread(target=self._read)

    def await_line(self, beginning: str, seconds: float) -> None:
        """Wait for a line that begins so."""
        self._wanted = beginning
        self._thread.start()
        assert self._seen.wait(seconds), f"no line began with {beginning}:\n{''.join(self._lines)}"
        assert any(line.startswith(beginning) for line in self._lines), "".join(self._lines)

    def close(self) -> None:
        self._thread.join(PATIENCE_SECONDS)
        self._stream.close()

    def _read(self) -> None:
        for line in self._stream:
            self._lines.append(line)
            if line.startswith(self._wanted):
                self._seen.set()
        self._seen.set()
