"""The layout of a run folder.

::

    RUN/checkpoints/<step, 12 digits>/manifest.json   the commit marker, written last
                                      model.keras     a self-contained Keras model
                                      resume/...      further state for an exact resume
    RUN/training.json                                 running, finished or failed
    RUN/evaluator/                                    the evaluator's state; the trainer only reads it
                  results/<step, 12 digits>.json      the results of a checkpoint
                  best.json                           the best checkpoint
                  leases/<step, 12 digits>/           copies of the checkpoints in use
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

MODEL_FILE = "model.keras"
MANIFEST_FILE = "manifest.json"
RESUME_DIR = "resume"
BEST_FILE = "best.json"
RESULTS_DIR = "results"
LEASES_DIR = "leases"

TEMPORARY_PREFIX = ".tmp-"
"""The prefix of uncommitted files and folders. Readers ignore them; the holder of the lock may delete them."""

MAX_STEP = 2**63 - 1
"""The highest step: TensorFlow, the ledger and the wire hold steps in 64 bits with a sign."""

_STEP_DIGITS = 12
_STEP_NAME = re.compile(rf"\d{{{_STEP_DIGITS},}}")


def step_name(step: int) -> str:
    """Return the name of a step's folder; names of up to 12 digits sort as steps do. Raise ValueError if it is none."""
    if not 0 <= step <= MAX_STEP:
        raise ValueError(f"a step is a number of training steps from 0 to {MAX_STEP}, not {step}")
    return f"{step:0{_STEP_DIGITS}d}"


def parse_step(name: str) -> int | None:
    """Return the step that a folder's name stands for, or None if it stands for none."""
    number = parse_number(name)
    return number if number is not None and number <= MAX_STEP else None


def parse_number(name: str) -> int | None:
    """Return the number in the name of a checkpoint's folder, which may be above `MAX_STEP`."""
    if not _STEP_NAME.fullmatch(name):
        return None
    number = int(name)
    return number if name == f"{number:0{_STEP_DIGITS}d}" else None


def steps_in(folder: Path) -> list[int]:
    """Return the steps that the names in a folder stand for, ascending; empty if the folder does not exist."""
    try:
        names = os.listdir(folder)  # noqa: PTH208 - a path for each of 100,000 names would take as long again
    except FileNotFoundError:
        return []
    return sorted(step for step in map(parse_step, names) if step is not None)


@dataclass(frozen=True)
class RunDir:
    """The paths in a run folder. Creating the object does not touch the disk."""

    root: Path

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints. The trainer owns it."""
        return self.root / "checkpoints"

    @property
    def training_json(self) -> Path:
        """The training journal. The trainer owns it."""
        return self.root / "training.json"

    @property
    def evaluator(self) -> Path:
        """The evaluator's state folder. The evaluator owns it."""
        return self.root / "evaluator"

    @property
    def leases(self) -> Path:
        """The folder of the checkpoints that the evaluator uses, one folder per step."""
        return self.evaluator / LEASES_DIR

    def checkpoint(self, step: int) -> Path:
        """Return the folder of one checkpoint, whether or not it exists."""
        return self.checkpoints / step_name(step)

    def committed_steps(self) -> list[int]:
        """Return the steps of all committed checkpoints, ascending; empty if the folder does not exist."""
        return [step for step in steps_in(self.checkpoints) if self.is_committed(step)]

    def is_committed(self, step: int) -> bool:
        """Return whether there is a committed checkpoint of a step."""
        return (self.checkpoint(step) / MANIFEST_FILE).exists()

    def has_begun(self) -> bool:
        """Return whether a trainer has written its journal or a checkpoint here, so that this is a run folder."""
        return self.training_json.exists() or any(map(self.is_committed, steps_in(self.checkpoints)))
