"""What 20 slices and 200 resamples cost, against the same evaluation without them and ``model.evaluate``, interleaved.

python -m benchmarks.slices_cost [--rounds 20] > benchmarks/results/slices_cost.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

EXAMPLES, BATCH, CLASSES, GROUPS = 8192, 256, 10, 10
WAYS = {
    "plain": ((), 0),
    "20 slices": (("label", "group"), 0),
    "200 resamples": ((), 200),
    "both": (("label", "group"), 200),
}


def main() -> None:
    """Measure, and print seconds and ratios as JSON."""
    import tensorflow as tf

    from understudy.evaluator.model.slot import Slot

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(EXAMPLES, 28, 28, 1)).astype("f4"), rng.integers(0, CLASSES, EXAMPLES)
    results = {}
    for name, model in _models().items():
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.keras"
            model.save(file)
            slot = Slot(tf.distribute.MirroredStrategy(["CPU:0"]), file, max_batch_size=BATCH)
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).cache()
        ways: dict[str, Callable[[], Any]] = {"model.evaluate": partial(model.evaluate, data, verbose=0)}
        ways |= {way: partial(_score, slot, x, y, *options) for way, options in WAYS.items()}
        spent: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for turn in range(rounds + 1):
            for way, run in ways.items():
                began = time.perf_counter(), time.process_time()
                run()
                if turn:  # the first one traces
                    spent[way].append((time.perf_counter() - began[0], time.process_time() - began[1]))
        results[name] = {
            way: {"seconds": round(statistics.median(elapsed for elapsed, _ in of_way), 3)}
            | {"times_plain": _ratio(of_way, spent["plain"], 0), "cpu_times_plain": _ratio(of_way, spent["plain"], 1)}
            for way, of_way in spent.items()
        }
    print(json.dumps({"examples": EXAMPLES, "batch": BATCH, "rounds": rounds, "medians": results}, indent=1))


def _ratio(of_way: list[tuple[float, float]], plain: list[tuple[float, float]], clock: int) -> float:
    """Return the median of the ratios to plain in the same turn, so that a machine that slows down does not count."""
    return round(statistics.median(one[clock] / other[clock] for one, other in zip(of_way, plain, strict=True)), 2)


def _models() -> dict[str, Any]:
    import keras
    from keras import layers

    def build(*middle: Any, metrics: Any) -> Any:
        model = keras.Sequential(
            [keras.Input((28, 28, 1)), *middle, layers.Flatten(), layers.Dense(CLASSES, activation="softmax")]
        )
        model.compile(loss="sparse_categorical_crossentropy", metrics=metrics)
        return model

    top = keras.metrics.SparseTopKCategoricalAccuracy(3, name="top3")
    conv = [layers.Conv2D(32, 3, activation="relu"), layers.MaxPooling2D(), layers.Conv2D(64, 3, activation="relu")]
    return {
        "mlp, accuracy": build(layers.Flatten(), layers.Dense(128, activation="relu"), metrics=["accuracy"]),
        "conv, accuracy": build(*conv, metrics=["accuracy"]),
        "conv, accuracy and top 3": build(*conv, metrics=["accuracy", top]),
    }


def _score(slot: Any, x: Any, y: Any, slices: tuple[str, ...], resamples: int) -> None:
    from understudy.evaluator.evaluation.breakdown import Breakdown, BreakdownOptions
    from understudy.evaluator.evaluation.slices import parse_slices
    from understudy.evaluator.types import Batch

    options = BreakdownOptions(slices=parse_slices(slices), resamples=resamples)
    scorer = slot.scorer((), increments=not options.is_empty)
    breakdown = Breakdown(options, slot.output_tasks)
    (name,) = (spec.name for spec in slot.signature.inputs)
    state = scorer.start()
    for start in range(0, EXAMPLES, BATCH):
        rows = slice(start, start + BATCH)
        group = np.arange(start, start + BATCH) % GROUPS
        batch = Batch(inputs={name: x[rows]}, targets={"targets": y[rows]}, features={"group": group})
        state = scorer.update(state, batch)
        if not options.is_empty:
            assert state.scored is not None
            breakdown.add(batch, state.scored, {})
    scorer.result(state)
    if not options.is_empty:
        breakdown.finish()


if __name__ == "__main__":
    main()
