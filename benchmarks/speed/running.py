"""Servers that run side by side with one model, each checked against the in-process model before it is measured."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np

from benchmarks.speed import wire
from benchmarks.speed.models import BenchmarkModel, Floats, model_file
from benchmarks.speed.processes import BenchmarkError, Launch, ProcessTree, free_port
from benchmarks.speed.servers import Server, Site

START_SECONDS = 120.0
"""How long a server may take to answer."""

PREPARE_SECONDS = 300.0
"""How long a process may take to save a model."""

_POLL_SECONDS = 0.3


@dataclass(frozen=True, kw_only=True)
class Bodies:
    """The requests of one model, as files in a folder that h2load sends; ``file`` is the ``.keras`` file."""

    model: BenchmarkModel
    file: Path
    folder: Path

    def path(self, rows: int) -> Path:
        """Return the file with the framed request of this batch size, written on first use."""
        path = self.folder / f"{self.model.name}_{rows}.request"
        if not path.exists():
            path.write_bytes(wire.framed(wire.request(self.model, rows)))
        return path

    def stream(self) -> Path:
        """Return the file with a whole stream of requests of one example, written on first use."""
        path = self.folder / f"{self.model.name}.stream"
        if not path.exists():
            path.write_bytes(wire.stream_body(self.model))
        return path

    def expected(self, rows: int) -> Floats:
        """Return the in-process answer."""
        with np.load(self.file.with_suffix(".npz")) as answers:
            found: Floats = answers[str(rows)]
        return found


@dataclass(frozen=True, kw_only=True)
class RunningServer:
    """A server that answers requests, with the size of its framed answer to each batch size."""

    server: Server
    tree: ProcessTree
    port: int
    reply_bytes: dict[int, int]

    @property
    def target(self) -> str:
        """Its address."""
        return f"127.0.0.1:{self.port}"


def prepare(folder: Path, model: BenchmarkModel, seeds: Sequence[int] = (0,)) -> Bodies:
    """Save a model, under each seed, in a separate process; return its requests."""
    command = (sys.executable, "-m", "benchmarks.speed.programs.prepare", str(folder), model.name, *map(str, seeds))
    try:
        subprocess.run(command, check=True, timeout=PREPARE_SECONDS, capture_output=True)
    except subprocess.CalledProcessError as error:
        raise BenchmarkError(f"{model.name} cannot be saved: {error.stderr.decode()[-1500:]}") from error
    return Bodies(model=model, file=model_file(folder, model.name, seeds[0]), folder=folder)


@contextmanager
def running(servers: Sequence[Server], bodies: Bodies, folder: Path) -> Iterator[list[RunningServer]]:
    """Start servers together, and yield them once each has answered every batch size like the in-process model."""
    with ExitStack() as stack:
        started = []
        for server in servers:
            site = _site(server, bodies, folder)
            tree = ProcessTree(server.name, server.launch(site), log=site.folder / "log")
            started.append((server, stack.enter_context(tree), site.port))
        yield [checked(server, tree, port, bodies) for server, tree, port in started]


@contextmanager
def running_one(launch: Launch, *, name: str, port: int, log: Path, bodies: Bodies) -> Iterator[RunningServer]:
    """Start one of this project's servers by its command, and yield it once it answers; its values are not checked."""
    with ProcessTree(name, launch, log=log) as tree:
        _wait(tree, port, wire.request(bodies.model, 1))
        yield RunningServer(server=Server(name=name, launch=lambda _: launch), tree=tree, port=port, reply_bytes={})


def checked(server: Server, tree: ProcessTree, port: int, bodies: Bodies) -> RunningServer:
    """Wait until a server answers like the in-process model; raise BenchmarkError if it does not."""
    target = f"127.0.0.1:{port}"
    _wait(tree, port, wire.request(bodies.model, 1))
    sizes = dict.fromkeys(bodies.model.batches, wire.FRAME_BYTES)
    if not server.echoes:
        for rows in bodies.model.batches:
            sizes[rows] += len(wire.checked_reply(target, bodies.model, rows, bodies.expected(rows)))
    return RunningServer(server=server, tree=tree, port=port, reply_bytes=sizes)


def _site(server: Server, bodies: Bodies, folder: Path) -> Site:
    place = folder / f"{bodies.model.name} {server.name}".replace(" ", "_")
    place.mkdir(parents=True)
    return Site(model=bodies.model, model_file=bodies.file, port=free_port(), folder=place)


def _wait(tree: ProcessTree, port: int, message: bytes) -> None:
    ends = time.monotonic() + START_SECONDS
    while time.monotonic() < ends:
        tree.check_alive()
        try:
            wire.call(f"127.0.0.1:{port}", message, timeout_seconds=5)
        except grpc.RpcError:
            time.sleep(_POLL_SECONDS)
        else:
            return
    raise BenchmarkError(f"{tree.name} did not answer within {START_SECONDS:.0f} s")
