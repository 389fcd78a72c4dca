"""Models such as users serve, without any option, beside the best Triton: a closed loop.

For each model, a server of this project first finds its settings, as it does behind the requests of a user; the
servers that are measured start with what it found, as after a restart.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from benchmarks.speed.closed_loop import Table, cells_of
from benchmarks.speed.entrants import Served
from benchmarks.speed.measuring import Measuring
from benchmarks.speed.models import REAL_MODELS, BenchmarkModel
from benchmarks.speed.processes import BenchmarkError
from benchmarks.speed.running import Bodies, prepare, running
from benchmarks.speed.servers import LONG_QUEUE_ROWS, found_settings, own, tritons, tuning

CONNECTIONS = (1, 8, 32)
FROZEN_SECONDS = 10.0
"""After this long constants for the weights are in use."""

_TUNING_SECONDS = 300.0
_POLL_SECONDS = 0.5
_FOUND = ("settings for this model and machine", "cannot find settings for the model")
_EVERY_LINE = ("timestamp", "level", "logger", "event")


def run(measuring: Measuring) -> dict[str, Any]:
    """Measure every cell; return the figures of each, a list with one value per round, and the settings of each model.

    A model that cannot be measured is a failure of the result, and does not keep the others from it.
    """
    table = Table(measuring)
    found: dict[str, dict[str, Any]] = {}
    for model in REAL_MODELS.values():
        try:
            found[model.name] = _measure(model, measuring, table)
        except BenchmarkError as error:
            table.failed(model.text, error)
    return {**table.result(REAL_MODELS.values()), "found_settings": found}


def _measure(model: BenchmarkModel, measuring: Measuring, table: Table) -> dict[str, Any]:
    """Measure every cell of a model; return what `read_settings` does."""
    measuring.progress.say(f"finding settings for the {model.text}")
    bodies = prepare(measuring.work, model)
    file, found = _find_settings(bodies, measuring.work / "tuning")
    measuring.progress.say(f"{found}; starting the servers")
    candidates = [*own("--max-queue-examples", str(LONG_QUEUE_ROWS), found=file)]
    candidates += tritons() if measuring.with_peers else []
    servers = [server for server in candidates if measuring.wants(server.name)]
    with running(servers, bodies, measuring.work / "real_models") as started:
        time.sleep(FROZEN_SECONDS)
        taking_part = [Served(running=one, bodies=bodies) for one in started]
        table.fill(cells_of(model, model.batches, CONNECTIONS), taking_part)
    return found


def _find_settings(bodies: Bodies, folder: Path) -> tuple[Path | None, dict[str, Any]]:
    """Run a server until it has found settings or none; return their file, if any, and what `read_settings` does."""
    server = tuning()
    place = folder / f"{bodies.model.name} {server.name}".replace(" ", "_")
    with running([server], bodies, folder) as (started,):
        ends = time.monotonic() + _TUNING_SECONDS
        while not (written := read_settings(place / "log")):
            started.tree.check_alive()
            if time.monotonic() > ends:
                raise BenchmarkError(f"no settings were found for {bodies.model.name} in {_TUNING_SECONDS:.0f} s")
            time.sleep(_POLL_SECONDS)
    file = found_settings(place)
    return file if file.exists() else None, written


def read_settings(log: Path) -> dict[str, Any]:
    """Return what a server wrote to its log of the settings that it found, or why it found none; empty before that."""
    lines = [line for line in log.read_text(errors="replace").splitlines(keepends=True) if line.endswith("}\n")]
    found = [json.loads(line) for line in lines if any(event in line for event in _FOUND)]
    return {name: value for name, value in found[0].items() if name not in _EVERY_LINE} if found else {}
