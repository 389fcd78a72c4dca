"""Scores the same batches repeatedly: with ``model.evaluate`` in this process, or over gRPC.

    python -m benchmarks.speed.programs.scoring keras MODEL MODEL_FILE
    python -m benchmarks.speed.programs.scoring understudy MODEL HOST:PORT

A worker: given ``rows`` and ``batches``, it scores this many batches of this many examples once.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.speed.models import CLASSES, BenchmarkModel, Floats, model_named
from benchmarks.speed.workers import answer_questions
from understudy.clients import Client

Labels = np.ndarray[Any, np.dtype[np.int64]]
Score = Callable[[Floats, Labels, int], float]
"""Maps inputs, targets and a batch size to the loss."""


def with_keras(model_file: str) -> Score:
    """Return a function that scores with Keras."""
    import keras

    model = keras.models.load_model(model_file)

    def score(x: Floats, y: Labels, rows: int) -> float:
        return float(model.evaluate(x, y, batch_size=rows, verbose=0, return_dict=True)["loss"])

    return score


def with_client(target: str) -> Score:
    """Return a function that scores over gRPC."""
    client = Client(target)

    def score(x: Floats, y: Labels, rows: int) -> float:
        batches = ((x[at : at + rows], y[at : at + rows]) for at in range(0, len(x), rows))
        return float(client.evaluate(batches).metrics["loss"])

    return score


def data(model: BenchmarkModel, count: int) -> tuple[Floats, Labels]:
    """Return examples with random targets, the same every time."""
    return model.rows(count), np.random.default_rng(count).integers(0, CLASSES, count)


def main(kind: str, model_name: str, place: str) -> None:
    """Answer questions."""
    model = model_named(model_name)
    score = with_keras(place) if kind == "keras" else with_client(place)

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        rows, batches = question["rows"], question["batches"]
        x, y = data(model, rows * batches)
        began = time.perf_counter()
        loss = score(x, y, rows)
        return {"seconds": time.perf_counter() - began, "loss": loss}

    answer_questions(answer)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3])
