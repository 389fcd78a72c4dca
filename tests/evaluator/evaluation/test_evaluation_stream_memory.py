"""Streams of any length take constant memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import psutil
import tensorflow as tf

from testkit import sample_models
from understudy.evaluator.batching.engine import Engine, EngineSettings
from understudy.evaluator.evaluation.evaluation_stream import EvaluationStream
from understudy.evaluator.model.slot import Slot
from understudy.evaluator.observer import SilentObserver
from understudy.evaluator.serving.servable import Servable
from understudy.evaluator.types import Batch

ROWS = 1024
SETTLING = 200
BATCHES = 1200
WIDTH = 4
MAY_GROW_BYTES = 10 * 2**20
"""The batches together are 24 MB."""


def test_a_stream_of_a_thousand_batches_takes_no_more_memory_than_one_of_hundreds(
    logical_cpus: tuple[str, ...], tmp_path: Path
) -> None:
    sample_models.class_metrics().save(tmp_path / "model.keras")
    slot = Slot(tf.distribute.MirroredStrategy(list(logical_cpus[:2])), tmp_path / "model.keras", max_batch_size=ROWS)
    engine = Engine(EngineSettings(), SilentObserver())
    rng = np.random.default_rng(0)

    def add(stream: EvaluationStream, batches: int) -> None:
        for _ in range(batches):
            x, y, _ = sample_models.class_data(rng, ROWS)
            batch = Batch(inputs={slot.signature.inputs[0].name: x}, targets={"targets": y})
            stream.add(batch).result(30)

    process = psutil.Process()
    try:
        with EvaluationStream(Servable(step=1, digest="", slot=slot).borrow(), slot.scorer(), engine) as stream:
            add(stream, SETTLING)
            before = process.memory_info().rss
            add(stream, BATCHES - SETTLING)
            grown = process.memory_info().rss - before
            assert stream.finish().examples == BATCHES * ROWS
    finally:
        engine.close(30)
    assert grown < MAY_GROW_BYTES, f"{grown / 2**20:.1f} MiB"
