"""Evaluates a small model and prints the largest memory of the process, in KiB.

python -m testkit.peak_memory FOLDER SLICES
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from testkit import exactness
from understudy.evaluator.evaluation.breakdown import BreakdownOptions
from understudy.evaluator.evaluation.slices import parse_slices
from understudy.evaluator.model.slot import Slot

BATCHES, BATCH_SIZE, WIDTH = 24, 256, 4
THRESHOLDS = 1000
"""Of the curve, whose state has four numbers for each."""


def main(folder: Path, slices: int) -> None:
    """Score all examples, and so many slices of them."""
    model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(1, activation="sigmoid")])
    model.compile(loss="binary_crossentropy", metrics=["accuracy", keras.metrics.AUC(num_thresholds=THRESHOLDS)])
    file = folder / f"{slices}.keras"
    model.save(file)
    slot = Slot(tf.distribute.MirroredStrategy(["CPU:0"]), file, max_batch_size=BATCH_SIZE)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCHES, BATCH_SIZE, WIDTH)).astype(np.float32)
    batches = [(each, (each[:, :1] > 0).astype(np.float32)) for each in x]
    if slices:
        groups = np.split(np.arange(BATCHES * BATCH_SIZE) % slices, BATCHES)
        options = BreakdownOptions(slices=parse_slices([exactness.GROUP]))
        found = exactness.score_parts(slot, batches, groups, options)
        assert len(found.slices) == slices
        assert all({"accuracy", "auc"} < {*part.metrics, *part.undefined} for part in found.slices)
    else:
        scorer = slot.scorer()
        state = scorer.start()
        for rows in batches:
            state = scorer.update(state, exactness.as_batch(slot, *rows))
        assert "auc" in scorer.result(state)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)  # noqa: T201 - the result


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
