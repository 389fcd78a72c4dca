"""Exit statuses of the commands, and their errors.

=====  ==========================================================================================
code   meaning
=====  ==========================================================================================
0      success
1      failure; the one line on stderr gives the reason
2      usage error: an unknown flag, a value out of range, a missing file
3, 4   `train`: the loss is NaN or infinite, or another task of the cluster died
7      `train`: the other tasks of the cluster did not arrive in time
5      `serve --exit-when-finished`: training failed
6      timeout: `serve` waited for training or evaluations, `train` for the last evaluation
8      `serve`: a device failed repeatedly
130    interrupted by the user
143    `train`: SIGTERM, after progress was saved; `serve --exit-when-finished`: SIGTERM before the end
=====  ==========================================================================================

A traceback means a defect.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import click

from understudy.cli.output import printable

TRAINING_FAILED: Final = 5
TIMED_OUT: Final = 6
DEVICE_FAILED: Final = 8
INTERRUPTED: Final = 130
TERMINATED: Final = 143

_EXTRA_OF: Final = {
    "envoy": "fast",
    "cryptography": "server",
    "grpc_health": "server",
    "grpc_reflection": "server",
    "h5py": "server",
    "joserfc": "server",
    "keras": "server",
    "opentelemetry": "otel",
    "prometheus_client": "server",
    "psutil": "server",
    "pyvoy": "fast",
    "ray": "ray",
    "starlette": "server",
    "structlog": "server",
    "tensorboard": "server",
    "tensorflow": "server",
    "tensorflow_serving": "server",
    "uvicorn": "server",
    "uvloop": "server",
    "sklearn": "examples",
}


class CommandError(click.ClickException):
    """An expected failure: one line on stderr, and an exit status, 1 unless the command documents others."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(printable(" ".join(message.split())))
        self.exit_code = exit_code  # type: ignore[misc] # click reads it from the instance


@contextmanager
def reported(*expected: type[Exception]) -> Iterator[None]:
    """Report these exceptions to the user by their text; all others propagate, as they are defects."""
    try:
        yield
    except expected as error:
        raise CommandError(str(error) or type(error).__name__) from error


@contextmanager
def written(output: Path) -> Iterator[None]:
    """Report that ``--output`` cannot be written."""
    try:
        yield
    except OSError as error:
        raise CommandError(f"cannot write {output}: {error.strerror}; give another --output") from error


@contextmanager
def missing_extras_reported() -> Iterator[None]:
    """Convert a missing optional dependency into the command that installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in _EXTRA_OF:
            raise
        remedy = f"pip install 'understudy[{_EXTRA_OF[module]}]'"
        raise CommandError(f"this command needs {module}, which is not installed; install it with: {remedy}") from error
