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
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import grpc
import httpx
import keras
import numpy as np

from testkit.certificates import Credentials
from testkit.preloading import STARTUP
from testkit.values import DTYPES, EVERY, EVERY_STEP, PLAIN, PLAIN_STEPS, WIDTH
from understudy.checkpoints import CheckpointPublisher, RunDir
from understudy.checkpoints.keras_signature import signature_of
from understudy.checkpoints.layout import MODEL_FILE
from understudy.clients import Client

PLUGINS = Path(__file__).parent / "plugins"
"""Where a front end of another package is installed, for the servers of these tests."""

START_SECONDS = 200.0
END_SECONDS = 100.0

_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Served:
    """A server's addresses and its process, and how to connect to it.

    Attributes:
        grpc: The address of the gRPC port.
        http: The address of the HTTP port.
        pid: The process.
        run: The run folder, or the folder of checkpoints.
        credentials: Those for TLS; None without TLS.
    """

    grpc: str
    http: str
    pid: int
    run: Path
    credentials: Credentials | None = None

    def channel(self, *options: tuple[str, int]) -> Any:
        """Return a channel to the gRPC port, with arguments of gRPC's core."""
        if self.credentials is None:
            return grpc.insecure_channel(self.grpc, options)
        return grpc.secure_channel(self.grpc, self.credentials.channel(), options)

    def connect(self) -> socket.socket:
        """Return a connection to the gRPC port."""
        host, port = self.grpc.rsplit(":", 1)
        connection = socket.create_connection((host, int(port)), START_SECONDS)
        if self.credentials is None:
            return connection
        return self.credentials.context().wrap_socket(connection, server_hostname=host)

    def http_client(self, timeout_seconds: float) -> httpx.Client:
        """Return a client of the HTTP port."""
        if self.credentials is None:
            return httpx.Client(base_url=f"http://{self.http}", timeout=timeout_seconds)
        context = self.credentials.context()
        return httpx.Client(base_url=f"https://{self.http}", verify=context, timeout=timeout_seconds)


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
def serving_both(
    folder: Path,
    *flags: str,
    credentials: Credentials | None = None,
    home: Path | None = None,
    environ: Mapping[str, str] = _NOTHING,
) -> Iterator[Pair]:
    """Serve both models, each in its own process, until the block ends; see `serving`."""
    publish(folder / EVERY, {EVERY_STEP: every_model()})
    publish(folder / PLAIN, {step: plain_model(step) for step in PLAIN_STEPS})
    options: dict[str, Any] = {"credentials": credentials, "home": home, "environ": environ}
    with (
        serving(folder / EVERY, EVERY, *flags, **options) as every,
        serving(folder / PLAIN, PLAIN, *flags, **options) as plain,
    ):
        with Client(plain.grpc, credentials=None if credentials is None else credentials.channel()) as client:
            for step in PLAIN_STEPS:
                client.promote(step)
            client.unpin()
        yield Pair(every, plain)


@contextmanager
def serving(
    run: Path,
    model_name: str,
    *flags: str,
    open_files: int | None = None,
    credentials: Credentials | None = None,
    home: Path | None = None,
    environ: Mapping[str, str] = _NOTHING,
    source: str = "--run-dir",
    errors: IO[bytes] | None = None,
) -> Iterator[Served]:
    """Serve a run until the block ends.

    Args:
        run: The run folder, or the folder that ``source`` names.
        model_name: The name of the model.
        flags: More flags of ``understudy serve``.
        open_files: The most open files.
        credentials: The certificate for TLS; None for none.
        home: The folder where it runs, its home and the place of its temporary files; None for those of this process.
        environ: Additions to its environment.
        source: The flag that names the folder.
        errors: Where its standard error goes; None for that of this process.
    """
    limited = () if open_files is None else ("bash", "-c", f'ulimit -n {open_files} && exec "$0" "$@"')
    process = subprocess.Popen(
        [
            *limited,
            *(sys.executable, "-m", "understudy.cli", "serve", source, str(run), "--model-name", model_name),
            *("--logical-cpus", "2", "--grpc-port", "0", "--http-port", "0", "--log-level", "error", *flags),
            *(() if credentials is None else ("--tls-cert", str(credentials.certificate))),
            *(() if credentials is None else ("--tls-key", str(credentials.key))),
        ],
        env={
            **os.environ,
            "PYTHONPATH": f"{STARTUP}{os.pathsep}{PLUGINS}",
            "TF_CPP_MIN_LOG_LEVEL": "2",
            **_homes(home),
            **environ,
        },
        cwd=home,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
    )
    watchdog = threading.Timer(START_SECONDS, process.kill)
    watchdog.start()
    try:
        served = replace(_ready(process, run), credentials=credentials)
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


def _homes(home: Path | None) -> dict[str, str]:
    return {} if home is None else dict.fromkeys(("HOME", "TMPDIR"), str(home))


def _ready(process: subprocess.Popen[str], run: Path) -> Served:
    assert process.stdout is not None
    for line in process.stdout:
        if match := re.match(r"READY grpc=(\S+) http=(\S+) step=\d+$", line):
            return Served(grpc=match[1], http=match[2], pid=process.pid, run=run)
    raise AssertionError("the server ended before it was ready")


def _identity(dtype: str) -> Any:
    """Return an identity layer; with another float dtype than its input's it would cast it."""
    return keras.layers.Identity(name=f"out_{dtype}", **({"dtype": dtype} if "float" in dtype else {}))
