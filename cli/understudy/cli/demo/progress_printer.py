"""Prints the demo's events, with the time since its start."""

from __future__ import annotations

import threading
import time

import click


class ProgressPrinter:
    """Prints lines of the form ``12.3 s  who  what``. Thread-safe."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._lock = threading.Lock()

    def say(self, who: str, what: str) -> None:
        """Print one line."""
        with self._lock:
            click.echo(f"{time.monotonic() - self._started:6.1f} s  {who:<10} {what}")

    def heading(self, text: str) -> None:
        """Print a title."""
        with self._lock:
            click.secho(f"\n{text}", bold=True)

    def text(self, text: str) -> None:
        """Print a line unchanged."""
        with self._lock:
            click.echo(text)
