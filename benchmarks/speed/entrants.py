"""The entrants of a closed loop: a server under h2load, one over streams, or the model without a wire."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol, Self

from benchmarks.speed import h2load, wire
from benchmarks.speed.figures import Figures
from benchmarks.speed.measuring import Measuring
from benchmarks.speed.processes import BenchmarkError, ProcessTree
from benchmarks.speed.running import Bodies, RunningServer, running
from benchmarks.speed.servers import LONG_QUEUE_ROWS
from benchmarks.speed.workers import Worker

STREAMS = 8
STREAM_SUFFIX = ", 8 streams"
"""The suffix of a server's name when it is measured over PredictStream."""

STREAMED = "understudy grpcio"
"""The server that is also measured over PredictStream."""

FUNCTION = "in process: function"
EVALUATOR = "in process: evaluator"

_ANSWER_SECONDS = 120.0
_REPLY_TOLERANCE = 0.02


@dataclass(frozen=True, kw_only=True, order=True)
class Cell:
    """One cell: a model, the batch size of a request, and the number of requests in flight."""

    model: str
    rows: int
    connections: int

    def __str__(self) -> str:
        return f"{self.model}, batch {self.rows}, {self.connections} connections"


class Participant(Protocol):
    """Something that can be measured in some cells."""

    @property
    def name(self) -> str:
        """The name in results."""

    @property
    def tree(self) -> ProcessTree:
        """The processes whose CPU time and memory count."""

    def takes(self, cell: Cell) -> bool:
        """Return whether a cell applies to it."""

    def measure(self, cell: Cell, seconds: float) -> Figures:
        """Measure for this long, after a warm-up."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """A server under h2load, one request in flight on each connection."""

    running: RunningServer
    bodies: Bodies

    @property
    def name(self) -> str:
        """The server's."""
        return self.running.server.name

    @property
    def tree(self) -> ProcessTree:
        """The server's."""
        return self.running.tree

    def takes(self, cell: Cell) -> bool:
        """Return whether the cell applies; for an echo, only the size of a request matters."""
        return not self.running.server.echoes or (cell.model == "mlp" and cell.rows in (1, 32))

    def measure(self, cell: Cell, seconds: float) -> Figures:
        """Measure; raise BenchmarkError if answers differ in size from the checked one."""
        before = self.tree.usage()
        body = self.bodies.path(cell.rows)
        load = h2load.run(self.running.port, body, connections=cell.connections, seconds=seconds)
        used = self.tree.usage().since(before)
        expected = self.running.reply_bytes[cell.rows]
        if abs(load.reply_bytes - expected) > max(1, _REPLY_TOLERANCE * expected):
            raise BenchmarkError(
                f"{self.name} answered {cell} with {load.reply_bytes:.0f} bytes on average where {expected} are right: "
                "it refused some"
            )
        return Figures.of(load.latencies_ms, seconds=load.seconds, answered=load.done, used=used)


@dataclass(frozen=True, kw_only=True)
class Streamed:
    """A server under h2load, with one PredictStream at a time on each connection, all answered in as many bytes."""

    served: Served
    reply_bytes: int

    @classmethod
    def checked(cls, served: Served) -> Self:
        """Return a server after it has answered a stream correctly; else raise BenchmarkError."""
        bodies, target = served.bodies, served.running.target
        return cls(served=served, reply_bytes=wire.checked_stream_bytes(target, bodies.model, bodies.expected(1)))

    @property
    def name(self) -> str:
        """The server's, with the suffix for streams."""
        return f"{self.served.name}{STREAM_SUFFIX}"

    @property
    def tree(self) -> ProcessTree:
        """The server's."""
        return self.served.tree

    def takes(self, cell: Cell) -> bool:
        """Return whether the cell applies: a stream keeps many requests in flight, so few connections do."""
        return cell.rows == 1 and cell.connections == STREAMS

    def measure(self, cell: Cell, seconds: float) -> Figures:
        """Measure: rate and CPU time are per message, latencies per stream; raise BenchmarkError as `Served` does."""
        before = self.tree.usage()
        port, body = self.served.running.port, self.served.bodies.stream()
        load = h2load.run(port, body, connections=cell.connections, seconds=seconds, method=wire.STREAM_METHOD)
        used = self.tree.usage().since(before)
        least, most = (self.reply_bytes * ended for ended in (load.done, load.done + cell.connections))
        if not least <= load.data_bytes <= most:
            raise BenchmarkError(
                f"{self.name} answered {load.done} streams with {load.data_bytes} bytes where {least} to {most} are "
                "right: it refused some messages"
            )
        messages = wire.MESSAGES * load.done
        figures = Figures.of(load.latencies_ms, seconds=load.seconds, answered=messages, used=used)
        return replace(figures, requests_per_second=wire.MESSAGES * figures.requests_per_second)


@dataclass(frozen=True, kw_only=True)
class InProcess:
    """The model in a worker's process, with as many requests in flight as a cell has connections."""

    name: str
    tree: Worker
    connections: int

    def takes(self, cell: Cell) -> bool:
        """Return whether the cell applies."""
        return cell.connections == self.connections

    def measure(self, cell: Cell, seconds: float) -> Figures:
        """Measure."""
        before = self.tree.usage()
        question = {"callers": cell.connections, "rows": cell.rows, "seconds": seconds}
        answer = self.tree.ask(question, timeout_seconds=seconds + _ANSWER_SECONDS)
        return Figures.of(**answer, used=self.tree.usage().since(before))


@contextmanager
def participants(measuring: Measuring, bodies: Bodies) -> Iterator[list[Participant]]:
    """Yield all entrants, ready to be measured; they end with the context.

    Beside other servers the in-process evaluator is left out: it shows where this project's own time goes.
    """
    with ExitStack() as stack:
        started = stack.enter_context(running(measuring.servers(), bodies, measuring.work / "closed_loop"))
        served = [Served(running=one, bodies=bodies) for one in started]
        taking_part: list[Participant] = [*served]
        taking_part += [Streamed.checked(one) for one in served if one.name == STREAMED]
        if measuring.wants(FUNCTION):
            taking_part.append(_in_process("function", 1, bodies, measuring, stack))
        if measuring.wants(EVALUATOR) and not measuring.with_peers:
            taking_part.append(_in_process("evaluator", 64, bodies, measuring, stack))
        yield taking_part


def _in_process(kind: str, connections: int, bodies: Bodies, measuring: Measuring, stack: ExitStack) -> InProcess:
    """Return the concrete function, called directly, or the evaluator, called by one thread."""
    name = f"in process: {kind}"
    place = measuring.work / f"{kind}_{bodies.model.name}"
    arguments = (kind, bodies.model.name, str(bodies.file), str(place), f"max_queue_examples={LONG_QUEUE_ROWS}")
    worker = stack.enter_context(Worker("in_process", *arguments, log=place.with_suffix(".log"), name=name))
    return InProcess(name=name, tree=worker, connections=connections)
