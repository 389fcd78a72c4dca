"""Starts all entrants of a closed loop with one model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from benchmarks.speed import entrants
from benchmarks.speed.entrants import Participant, Served, Streamed
from benchmarks.speed.measuring import Measuring
from benchmarks.speed.running import Bodies, running
from benchmarks.speed.servers import LONG_QUEUE_ROWS
from benchmarks.speed.workers import Worker

STREAMED = "understudy grpcio"
"""The server that is also measured over PredictStream."""


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
        if measuring.wants(entrants.FUNCTION):
            taking_part.append(entrants.function(_in_process("function", bodies, measuring, stack)))
        if measuring.wants(entrants.EVALUATOR) and not measuring.with_peers:
            taking_part.append(entrants.evaluator(_in_process("evaluator", bodies, measuring, stack)))
        yield taking_part


def _in_process(kind: str, bodies: Bodies, measuring: Measuring, stack: ExitStack) -> Worker:
    place = measuring.work / f"{kind}_{bodies.model.name}"
    arguments = (kind, bodies.model.name, str(bodies.file), str(place), f"max_queue_examples={LONG_QUEUE_ROWS}")
    log = place.with_suffix(".log")
    return stack.enter_context(Worker("in_process", *arguments, log=log, name=f"in process: {kind}"))
