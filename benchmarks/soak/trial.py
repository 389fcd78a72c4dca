"""What every soak trial is given: how much to try, where to work, and where its result goes."""

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
    """One run of a topic, which may be the continuation of one that was broken off.

    Args:
        topic: Its name.
        count: How much to try, or None for as much as the topic says.
        seed: Of everything that is random.
        work: The folder for its state, or None for one under the system's temporary folder.
        results: The folder its result is written to.

    Attributes:
        result: What was written last.
        work: The folder for its state; there until `finish`.
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
        """Return how much to try."""
        return default if self._count is None else self._count

    def chance(self, part: int) -> random.Random:
        """Return the random numbers of one part of the trial, the same ones each time."""
        return random.Random(f"{self.seed}-{part}")  # noqa: S311 - no secrets here

    def load_state(self) -> dict[str, Any]:
        """Return what `save_state` was given last, perhaps by a process that was ended; empty the first time."""
        return json.loads(self._state_file.read_bytes()) if self._state_file.exists() else {}

    def save_state(self, state: Mapping[str, Any]) -> None:
        """Remember how far it is."""
        temporary = self._state_file.with_suffix(".tmp")
        temporary.write_text(json.dumps(state))
        temporary.replace(self._state_file)

    def report(self, *, held: bool, **figures: Any) -> None:
        """Write the result as it is now.

        Args:
            held: Whether everything that was tried so far came out as it should.
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
        """Write that it did not hold, and what ended it, beside what was written last."""
        self.result |= {"held": False, "ended_by": f"{type(error).__name__}: {error}"}
        self._write()

    def finish(self) -> None:
        """Delete the work folder: there is nothing left to go on with."""
        shutil.rmtree(self.work)

    def _write(self) -> None:
        self._results.mkdir(parents=True, exist_ok=True)
        file = self._results / f"soak_{self.topic}.json"
        file.write_text(json.dumps(self.result, indent=2) + "\n")
