"""Closed loop: a constant number of requests in flight, for every model, batch size and number of connections.

All servers of a model run side by side. Each round measures every server in every cell, with the cells in a new order
and the servers rotated, so that other load on the machine affects all alike.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from benchmarks.speed.entrants import Cell, Participant, participants
from benchmarks.speed.figures import Figures
from benchmarks.speed.measuring import Measuring
from benchmarks.speed.models import BATCHES, MODELS, BenchmarkModel
from benchmarks.speed.processes import BenchmarkError, ProcessTree, at_rest_cpu
from benchmarks.speed.running import prepare

COMPARED = ("mlp", "conv")
CONNECTIONS = (1, 8, 32, 64)
RESTLESS_SHARE = 0.02
"""A process that uses more of a core than this while idle is stopped while others are measured."""

_MANY_ROWS = 8192
_REASON_CHARACTERS = 300
"""How many characters of the end of a reason are kept; a traceback ends with the error."""


def run(measuring: Measuring) -> dict[str, Any]:
    """Measure every cell; return the figures of each, a list with one value per round."""
    table = Table(measuring)
    models = [MODELS[name] for name in COMPARED]
    for model in models:
        measuring.progress.say(f"starting the servers of the {model.text}")
        with participants(measuring, prepare(measuring.work, model)) as taking_part:
            table.fill(cells_of(model, BATCHES, CONNECTIONS), taking_part)
    return table.result(models)


def cells_of(model: BenchmarkModel, batches: Sequence[int], connections: Sequence[int]) -> list[Cell]:
    """Return every cell of a model."""
    pairs = itertools.product(batches, connections)
    return [Cell(model=model.name, rows=rows, connections=count) for rows, count in pairs]


def order(cells: Sequence[Cell], taking_part: Sequence[Participant], turn: int) -> Iterator[tuple[Cell, Participant]]:
    """Yield the entrants and cells of one round, in order."""
    shuffled = list(cells)
    random.Random(turn).shuffle(shuffled)  # noqa: S311 - no secrets here
    for place, cell in enumerate(shuffled):
        first = (turn + place) % len(taking_part)
        for participant in (*taking_part[first:], *taking_part[:first]):
            if participant.takes(cell):
                yield cell, participant


def length_of(cell: Cell) -> int:
    """Return how many times as long a cell is measured: with thousands of queued examples, an answer takes a second."""
    return 1 + cell.rows * cell.connections // _MANY_ROWS


class Table:
    """The measurements so far."""

    def __init__(self, measuring: Measuring) -> None:
        self._measuring = measuring
        self._figures: dict[tuple[Cell, str], list[Figures]] = {}
        self._failures: list[str] = []
        self._at_rest: dict[str, float] = {}

    def fill(self, cells: Sequence[Cell], taking_part: Sequence[Participant]) -> None:
        """Measure all entrants in every cell of one model."""
        rounds = [list(order(cells, taking_part, turn)) for turn in range(self._measuring.rounds)]
        self._measuring.progress.expect(sum(map(len, rounds)))
        restless = self._restless(taking_part)
        for tree in restless:
            tree.pause()
        try:
            for cell, participant in itertools.chain.from_iterable(rounds):
                participant.tree.resume()
                self._measure(cell, participant)
                if participant.tree in restless:
                    participant.tree.pause()
        finally:
            for tree in restless:
                tree.resume()

    def result(self, models: Iterable[BenchmarkModel]) -> dict[str, Any]:
        """Return the figures of every cell and entrant, in the format of results."""
        return {
            "models": {model.name: model.text for model in models},
            "cpu_share_at_rest": self._at_rest,
            "failures": self._failures,
            "rows": [_row(cell, name, figures) for (cell, name), figures in sorted(self._figures.items())],
        }

    def failed(self, what: str, error: BenchmarkError) -> None:
        """Record what could not be measured."""
        self._failures.append(f"{what}: {' '.join(str(error).split())[-_REASON_CHARACTERS:]}")
        self._measuring.progress.step(self._failures[-1])

    def _measure(self, cell: Cell, participant: Participant) -> None:
        try:
            figures = participant.measure(cell, self._measuring.seconds * length_of(cell))
        except BenchmarkError as error:
            self.failed(f"{cell}: {participant.name}", error)
            return
        self._figures.setdefault((cell, participant.name), []).append(figures)
        self._measuring.progress.step(
            f"{cell}: {participant.name}: {figures.requests_per_second:.0f} requests/s, p99 {figures.p99_ms:.1f} ms"
        )

    def _restless(self, taking_part: Sequence[Participant]) -> list[ProcessTree]:
        trees = list({one.tree.name: one.tree for one in taking_part}.values())
        shares = at_rest_cpu(trees)
        self._at_rest |= {name: round(share, 3) for name, share in shares.items()}
        return [tree for tree in trees if shares[tree.name] > RESTLESS_SHARE]


def _row(cell: Cell, participant: str, figures: Sequence[Figures]) -> dict[str, Any]:
    columns = [field.name for field in dataclasses.fields(Figures)]
    return {
        **dataclasses.asdict(cell),
        "entrant": participant,
        **{column: [getattr(one, column) for one in figures] for column in columns},
    }
