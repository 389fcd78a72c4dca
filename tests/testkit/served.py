"""A real ``understudy serve`` with models of every datatype."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from testkit.values import DTYPES, EVERY, EVERY_STEP, PLAIN, PLAIN_STEPS, WIDTH
from understudy.checkpoints import CheckpointPublisher, RunDir
from understudy.checkpoints.keras_signature import signature_of
from understudy.checkpoints.layout import MODEL_FILE
from understudy.clients import Client

PLUGINS = Path(__file__).parent / "plugins"
"""Where a front end of another package is installed, for the servers of these tests."""

START_SECONDS = 90.0
END_SECONDS = 40.0


@dataclass(frozen=True)
class Served:
    """A server's addresses and its process."""

    grpc: str
    http: str
    pid: int


@dataclass(frozen=True)
class Pair:
    """The servers of the two models of `protocols.values`."""

    every: Served
    plain: Served


def publish(run: Path, models: Mapping[int, Any]) -> None:
    """Publish models by their steps."""
    publisher = CheckpointPublisher(RunDir(run), keep=10)
    for step, model in models.items():

        def write(folder: Path, model: Any = model) -> None:
            model.save(folder / MODEL_FILE)

        publisher.publish(step, write, epoch=None, final=False, metrics={}, signature=signature_of(model))


def every_model() -> Any:
    inputs = {dtype: keras.Input((WIDTH,), dtype=dtype, name=f"in_{dtype}") for dtype in DTYPES}
    outputs = {f"out_{dtype}": _identity(dtype)(inputs[dtype]) for dtype in DTYPES}
    return keras.Model(list(inputs.values()), outputs)


def plain_model(step: int) -> Any:
    x = keras.Input((WIDTH,), name="x")
    model = keras.Model(x, keras.layers.Dense(WIDTH, use_bias=False, name="y")(x))
    model.layers[-1].set_weights([np.eye(WIDTH, dtype=np.float32) * step])
    model.compile(loss="mse", metrics=["mae"])
    return model


@contextmanager
def serving_both(folder: Path, *flags: str) -> Iterator[Pair]:
    """Serve both models, each in its own process, until the block ends."""
    publish(folder / EVERY, {EVERY_STEP: every_model()})
    publish(folder / PLAIN, {step: plain_model(step) for step in PLAIN_STEPS})
    with serving(folder / EVERY, EVERY, *flags) as every, serving(folder / PLAIN, PLAIN, *flags) as plain:
        with Client(plain.grpc) as client:
            for step in PLAIN_STEPS:
                client.promote(step)
            client.unpin()
        yield Pair(every, plain)


@contextmanager
def serving(run: Path, model_name: str, *flags: str, open_files: int | None = None) -> Iterator[Served]:
    """Serve a run until the block ends, with at most this many open files."""
    limited = () if open_files is None else ("bash", "-c", f'ulimit -n {open_files} && exec "$0" "$@"')
    process = subprocess.Popen(
        [
            *limited,
            *(sys.executable, "-m", "understudy.cli", "serve", "--run-dir", str(run), "--model-name", model_name),
            *("--logical-cpus", "2", "--grpc-port", "0", "--http-port", "0", "--log-level", "error", *flags),
        ],
        env={**os.environ, "PYTHONPATH": str(PLUGINS), "TF_CPP_MIN_LOG_LEVEL": "2"},
        stdout=subprocess.PIPE,
        text=True,
    )
    watchdog = threading.Timer(START_SECONDS, process.kill)
    watchdog.start()
    try:
        served = _ready(process)
        watchdog.cancel()
        yield served
        assert process.poll() is None, "the server has ended"
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_SECONDS) == 0
    finally:
        watchdog.cancel()
        if process.poll() is None:
            process.kill()
        process.communicate()


def free_ports(count: int) -> list[int]:
    """Return ports that nothing listens on, for servers that must keep theirs over a restart."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _ready(process: subprocess.Popen[str]) -> Served:
    assert process.stdout is not None
    for line in process.stdout:
        if match := re.match(r"READY grpc=(\S+) http=(\S+) step=\d+$", line):
            return Served(grpc=match[1], http=match[2], pid=process.pid)
    raise AssertionError("the server ended before it was ready")


def _identity(dtype: str) -> Any:
    """Return an identity layer; with another float dtype than its input's it would cast it."""
    return keras.layers.Identity(name=f"out_{dtype}", **({"dtype": dtype} if "float" in dtype else {}))
