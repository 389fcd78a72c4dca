"""Draws docs/slices.svg: the accuracy of each digit with its interval, and what a gate makes of it, as scored.

python tools/slices_picture.py
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from understudy.evaluator.evaluation.breakdown import Breakdown, BreakdownOptions, BrokenDown
from understudy.evaluator.evaluation.slices import parse_slices
from understudy.evaluator.model.slot import Slot
from understudy.evaluator.serving.gate_trial import Measured, judge
from understudy.evaluator.serving.gates import parse_gate
from understudy.evaluator.types import Batch, GateCondition

PICTURE = Path(__file__).parents[1] / "docs" / "slices.svg"
TESTED = 700
MARGIN = 0.02
LEFT, WIDTH, TOP, ROW, HIDDEN = 90, 330, 64, 24, 0.75
"""Of the diagram, in pixels; accuracies below the last are not shown."""

COLORS = {"accepted": "#1a7f37", "undecided": "#9a6700", "refused": "#cf222e"}


def main() -> None:
    """Train a small model on the bundled digits, score it after 14 epochs and after 18, and draw."""
    keras.utils.set_random_seed(1)
    images, labels = load_digits(return_X_y=True)
    x, y = (images / 16).astype("f4"), labels.astype("i4")
    model = keras.Sequential(
        [keras.Input((64,), name="pixels"), keras.layers.Dense(48, "relu"), keras.layers.Dense(10, "softmax")]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    scores = []
    for epochs in (14, 4):
        model.fit(x[TESTED:], y[TESTED:], epochs=epochs, batch_size=32, verbose=0)
        scores.append(_scored(model, x[:TESTED], y[:TESTED]))
    PICTURE.write_text(_drawn(*scores), encoding="utf-8")


def _scored(model: Any, x: Any, y: Any) -> BrokenDown:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.keras"
        model.save(file)
        slot = Slot(tf.distribute.MirroredStrategy(["CPU:0"]), file, max_batch_size=TESTED)
    options = BreakdownOptions(slices=parse_slices(["label"]), resamples=1000)
    scorer, breakdown = slot.scorer((), increments=True), Breakdown(options, slot.output_tasks)
    batch = Batch(inputs={"pixels": x}, targets={"targets": y})
    state = scorer.update(scorer.start(), batch)
    assert state.scored is not None  # noqa: S101 - increments were requested
    breakdown.add(batch, state.scored, {})
    return breakdown.finish()


def _decided(name: str, before: BrokenDown, after: BrokenDown) -> GateCondition:
    key = f"accuracy[{name}]"
    gate = parse_gate(f"test/{key} not worse by {MARGIN} at 95%", datasets=["test"], modes={}, slices=[("label",)])
    value, held = (
        next(part.metrics["accuracy"] for part in score.slices if part.name == name) for score in (after, before)
    )
    measured = Measured(
        value=value,
        baseline_step=14,
        baseline_value=held,
        resampled=after.resampled[key] - before.resampled[key],
    )
    (condition,) = judge([(gate, measured)])
    return condition


def _x(value: float) -> float:
    return LEFT + WIDTH * (max(value, HIDDEN) - HIDDEN) / (1 - HIDDEN)


def _drawn(before: BrokenDown, after: BrokenDown) -> str:
    rows, told = [], []
    for place, part in enumerate(after.slices):
        y = TOP + ROW * place
        bounds, value = part.intervals["accuracy"], part.metrics["accuracy"]
        decided = _decided(part.name, before, after)
        outcome = decided.outcome.value
        change = "" if decided.interval is None else f"{decided.interval.low:+.3f} to {decided.interval.high:+.3f}"
        rows.append(
            f'<text x="{LEFT - 12}" y="{y + 4}" text-anchor="end">{part.name}</text>'
            f'<path d="M{_x(bounds.low):.1f} {y}H{_x(bounds.high):.1f}" stroke="#0969da" stroke-width="2"/>'
            f'<circle cx="{_x(value):.1f}" cy="{y}" r="4" fill="#0969da"/>'
            f'<text x="{LEFT + WIDTH + 24}" y="{y + 4}">{value:.3f}</text>'
            f'<text x="{LEFT + WIDTH + 84}" y="{y + 4}">{change}</text>'
            f'<text x="{LEFT + WIDTH + 236}" y="{y + 4}" fill="{COLORS[outcome]}">{outcome}</text>'
        )
        told.append(f"{part.name} {value:.3f}, {outcome}")
    bottom = TOP + ROW * len(rows) - ROW // 2
    ticks = "".join(
        f'<path d="M{_x(tick):.1f} {TOP - 12}V{bottom}" stroke="#d1d9e0"/>'
        f'<text x="{_x(tick):.1f}" y="{bottom + 16}" text-anchor="middle" fill="#59636e">{tick:.2f}</text>'
        for tick in np.arange(HIDDEN, 1.001, 0.05)
    )
    head = (
        f'<text x="{LEFT}" y="24" font-weight="600">accuracy of each digit, 95 % intervals</text>'
        f'<text x="{LEFT + WIDTH + 84}" y="24" font-weight="600">gate: not worse by {MARGIN} at 95 %</text>'
        f'<text x="{LEFT + WIDTH + 84}" y="42" fill="#59636e">difference from the serving step</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {bottom + 30}" role="img" '
        'font-family="system-ui,sans-serif" font-size="13">'
        f"<title>Slices and a gate: {'; '.join(told)}</title>"
        f'<rect width="760" height="{bottom + 30}" fill="#fff"/>'
        f'<g fill="#1b1f24">{head}{ticks}{"".join(rows)}</g></svg>\n'
    )


if __name__ == "__main__":
    main()
