"""Saves a model and, if servers are checked against it, its in-process answers.

python -m benchmarks.speed.programs.prepare FOLDER MODEL [SEED...]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.speed.models import MODELS, REAL_MODELS, model_file, model_named


def prepare(folder: Path, name: str, seed: int) -> None:
    """Save a model under one seed, with its answers if servers are compared with it."""
    model = model_named(name)
    built = model.build(seed)
    file = model_file(folder, name, seed)
    built.save(file)
    if name not in MODELS | REAL_MODELS:
        return
    answers: dict[str, Any] = {str(rows): np.asarray(built(tf.constant(model.rows(rows)))) for rows in model.batches}
    np.savez(file.with_suffix(".npz"), **answers)


if __name__ == "__main__":
    for chosen in sys.argv[3:] or ["0"]:
        prepare(Path(sys.argv[1]), sys.argv[2], int(chosen))
