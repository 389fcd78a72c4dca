"""Scores a checkpoint with ``model.evaluate`` in a separate process, for the demo to compare with.

python -m understudy.cli.demo.reference MODEL_FILE TEST_FILE BATCH_ROWS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf


def main(model_file: Path, test_file: Path, batch_size: int) -> None:
    """Print the metrics by name as one line of JSON."""
    with np.load(test_file) as data:
        batches = tf.data.Dataset.from_tensor_slices((data["x"], data["y"])).batch(batch_size)
    model = keras.models.load_model(model_file)
    print(json.dumps(model.evaluate(batches, verbose=0, return_dict=True)))  # noqa: T201 - the result


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
