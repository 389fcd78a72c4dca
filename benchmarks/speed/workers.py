"""A program that measures on request: one line of JSON in, one line of JSON out."""

from __future__ import annotations

import json
import selectors
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from benchmarks.speed.processes import BenchmarkError, Launch, ProcessTree

START_SECONDS = 120.0
ARRIVALS_SECONDS = 90.0
"""How long the requests of the program ``arrivals`` may take after their time."""


class Worker(ProcessTree):
    """A program under ``benchmarks.speed.programs`` that answers questions; a context that ends with it."""

    def __init__(self, program: str, *arguments: str, log: Path, name: str = "") -> None:
        command = (sys.executable, "-m", f"benchmarks.speed.programs.{program}", *arguments)
        super().__init__(name or program, Launch(command=command), log=log, stdin=True)
        try:
            self.ask({}, timeout_seconds=START_SECONDS)
        except BenchmarkError:
            self.end()
            raise

    def ask(self, question: dict[str, Any], *, timeout_seconds: float) -> Any:
        """Return the answer to a question, or raise BenchmarkError; to an empty one, None as soon as it is ready."""
        self.tell(question)
        return self.answer(timeout_seconds=timeout_seconds)

    def tell(self, question: dict[str, Any]) -> None:
        """Send a question without waiting."""
        self.check_alive()
        stdin = _pipe(self.popen.stdin)
        try:
            stdin.write(json.dumps(question) + "\n")
            stdin.flush()
        except BrokenPipeError as error:
            self.popen.wait(START_SECONDS)
            self.check_alive()
            raise BenchmarkError(f"{self.name} takes no questions") from error

    def answer(self, *, timeout_seconds: float) -> Any:
        """Return the answer to the last question; raise as `ask` does."""
        with selectors.DefaultSelector() as waiting:
            waiting.register(_pipe(self.popen.stdout), selectors.EVENT_READ)
            answered = waiting.select(timeout_seconds)
        if not answered:
            raise BenchmarkError(f"{self.name} did not answer within {timeout_seconds:.0f} s")
        line = _pipe(self.popen.stdout).readline()
        if not line:
            self.popen.wait(timeout_seconds)
            self.check_alive()
        return json.loads(line)


def answer_questions(answer: Callable[[dict[str, Any]], Any]) -> None:
    """Run as a worker: answer the questions on stdin until it ends."""
    for line in sys.stdin:
        question = json.loads(line)
        print(json.dumps(answer(question) if question else None), flush=True)


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream
