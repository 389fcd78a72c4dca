"""The parameters of a soak trial: how much to try, the work folder, and the result file."""

from __future__ import annotations

import json
import os
import platform
import random
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Trial:
    """One run of a topic, which may continue an interrupted one.

    Args:
        topic: Its name.
        count: Number of cases, or None for the topic's default.
        seed: Seed of all random numbers.
        work: The folder for its state, or None for one under the system's temporary folder.
        results: The folder of its result.

    Attributes:
        result: The last result written.
        work: The folder for its state; exists until `finish`.
    """

    def __init__(self, *, topic: str, count: int | None, seed: int, work: Path | None, results: Path) -> None:
        self.topic = topic
        self.seed = seed
        self.work = work or Path(tempfile.gettempdir()) / f"understudy-soak-{topic}-{seed}"
        self.work.mkdir(parents=True, exist_ok=True)
        self._count = count
        self._results = results
        self._began = time.time()
        self._state_file = self.work / "state.json"
        self.result: dict[str, Any] = {"topic": topic, "held": False, "seed": seed}

    def count(self, default: int) -> int:
        """Return the number of cases."""
        return default if self._count is None else self._count

    def chance(self, part: int) -> random.Random:
        """Return the random numbers of one part of the trial, the same each time."""
        return random.Random(f"{self.seed}-{part}")  # noqa: S311 - no secrets here

    def load_state(self) -> dict[str, Any]:
        """Return the last state from `save_state`, also of an earlier process; empty the first time."""
        return json.loads(self._state_file.read_bytes()) if self._state_file.exists() else {}

    def save_state(self, state: Mapping[str, Any]) -> None:
        """Store the progress."""
        temporary = self._state_file.with_suffix(".tmp")
        temporary.write_text(json.dumps(state))
        temporary.replace(self._state_file)

    def report(self, *, held: bool, **figures: Any) -> None:
        """Write the current result.

        Args:
            held: Whether everything tried so far held.
            figures: Counts and measurements by name.
        """
        self.result = {
            "topic": self.topic,
            "held": held,
            "seed": self.seed,
            **figures,
            "seconds_since_last_start": round(time.time() - self._began, 1),
            "python": platform.python_version(),
            "processors": len(os.sched_getaffinity(0)),
        }
        self._write()

    def broke_off(self, error: Exception) -> None:
        """Write that it did not hold, and the error that ended it, beside the last result."""
        self.result |= {"held": False, "ended_by": f"{type(error).__name__}: {error}"}
        self._write()

    def finish(self) -> None:
        """Delete the work folder, as nothing is left to resume."""
        shutil.rmtree(self.work)

    def _write(self) -> None:
        self._results.mkdir(parents=True, exist_ok=True)
        file = self._results / f"soak_{self.topic}.json"
        file.write_text(json.dumps(self.result, indent=2) + "\n")
