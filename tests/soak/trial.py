"""The parameters of a soak trial: how much to try, the work folder, and the result file."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_CODE = (
    *("proto", "clients", "checkpoints", "experiments", "trainer", "evaluator", "service", "cli"),
    *("tests/soak", "tests/testkit"),
)
"""The folders of the code that a trial runs. Results and documents are in others."""


class Trial:
    """One run of a topic, which may continue an interrupted one.

    Args:
        topic: Its name.
        count: Number of cases, or None for the topic's default.
        seed: Seed of all random numbers.
        work: The folder for its state, or None for one under the system's temporary folder.
        results: The folder of its result.

    Attributes:
        code: A digest of the code that the trial runs.
        result: The last result written.
        work: The folder for its state; exists until `finish`.
    """

    def __init__(self, *, topic: str, count: int | None, seed: int, work: Path | None, results: Path) -> None:
        self.topic = topic
        self.seed = seed
        self.code = code_digest()
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
        """Return the last state from `save_state`, also of an earlier process; empty the first time.

        Raises:
            SystemExit: Other code saved it.
        """
        if not self._state_file.exists():
            return {}
        stored = json.loads(self._state_file.read_bytes())
        if stored.get("code") != self.code:
            raise SystemExit(
                f"{self.work} is of the code {stored.get('code')}, this is {self.code}; delete it to begin anew"
            )
        state: dict[str, Any] = stored["state"]
        return state

    def save_state(self, state: Mapping[str, Any]) -> None:
        """Store the progress."""
        temporary = self._state_file.with_suffix(".tmp")
        temporary.write_text(json.dumps({"code": self.code, "state": state}))
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
            "code": self.code,
            "commit": _commit(),
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


def code_digest(root: Path = _ROOT) -> str:
    """Return a digest that changes with the code of a trial, and with nothing else in the repository."""
    files = (path for folder in _CODE for suffix in ("py", "proto") for path in (root / folder).rglob(f"*.{suffix}"))
    digest = hashlib.sha256()
    for path in sorted(path for path in files if "_pb2" not in path.name and ".venv" not in path.parts):
        digest.update(f"{path.relative_to(root)}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:12]


def _commit() -> str:
    """Return the current commit, for the reader of a result; empty without Git."""
    command = ["git", "-C", str(_ROOT), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""
