"""Models such as users serve, without any option, beside the best Triton: a closed loop.

For each model, a server of this project first finds its settings, as it does behind the requests of a user; the
servers that are measured start with what it found, as after a restart.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.speed.closed_loop import Table, cells_of
from benchmarks.speed.entrants import Served
from benchmarks.speed.measuring import Measuring
from benchmarks.speed.models import REAL_MODELS
from benchmarks.speed.processes import BenchmarkError
from benchmarks.speed.running import Bodies, prepare, running
from benchmarks.speed.servers import LONG_QUEUE_ROWS, found_settings, own, tritons, tuning

CONNECTIONS = (1, 8, 32)
FROZEN_SECONDS = 10.0
"""After this long constants for the weights are in use."""

_TUNING_SECONDS = 300.0
_POLL_SECONDS = 0.5


def run(measuring: Measuring) -> dict[str, Any]:
    """Measure every cell; return the figures of each, a list with one value per round."""
    table = Table(measuring)
    for model in REAL_MODELS.values():
        measuring.progress.say(f"finding settings for the {model.text}")
        bodies = prepare(measuring.work, model)
        found = _find_settings(bodies, measuring.work / "tuning")
        measuring.progress.say("starting the servers")
        candidates = [*own("--max-queue-examples", str(LONG_QUEUE_ROWS), found=found)]
        candidates += tritons() if measuring.with_peers else []
        servers = [server for server in candidates if measuring.wants(server.name)]
        with running(servers, bodies, measuring.work / "real_models") as started:
            time.sleep(FROZEN_SECONDS)
            taking_part = [Served(running=one, bodies=bodies) for one in started]
            table.fill(cells_of(model, model.batches, CONNECTIONS), taking_part)
    return table.result(REAL_MODELS.values())


def _find_settings(bodies: Bodies, folder: Path) -> Path:
    """Run a server until it has found its settings; return their file."""
    server = tuning()
    with running([server], bodies, folder) as (started,):
        file = found_settings(folder / f"{bodies.model.name} {server.name}".replace(" ", "_"))
        ends = time.monotonic() + _TUNING_SECONDS
        while not file.exists():
            started.tree.check_alive()
            if time.monotonic() > ends:
                raise BenchmarkError(f"no settings were found for {bodies.model.name} in {_TUNING_SECONDS:.0f} s")
            time.sleep(_POLL_SECONDS)
    return file
