"""Scores a dataset on workers in a process of its own, and kills itself once half of the examples are scored.

python driver.py CHECKPOINT DATA PROGRESS-FILE [CLUSTER]
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from pathlib import Path
from typing import Any

from understudy.checkpoints.local_checkpoint import open_local_checkpoint
from understudy.evaluator.sharding.evaluate import evaluate_files
from understudy.evaluator.sharding.predict import predict_files
from understudy.evaluator.sharding.progress_file import ProgressFile
from understudy.evaluator.sharding.work import DataSource, ModelSource, Work


def make_pool(work: Work, cluster: str | None) -> Any:
    if cluster is not None:
        from understudy.evaluator.sharding.ray_pool import RayPool

        return RayPool(pickle.dumps(work), work.model.folder, address=cluster, workers=1)
    from understudy.evaluator.sharding.local_pool import LocalPool

    return LocalPool(work, workers=2)


def end_in_the_middle(done: int, total: int | None) -> None:
    assert total is not None
    if done > total // 2:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    command, checkpoint, data, target, *cluster = sys.argv[1:]
    model = ModelSource(folder=Path(checkpoint), digest=open_local_checkpoint(Path(checkpoint)).digest)
    source = DataSource(name="data", paths=(Path(data),), inputs_only=command == "predict")
    work = Work(model=model, data=source, batch_size=8)
    options: dict[str, Any] = {
        "step": 7,
        "make_pool": lambda work: make_pool(work, cluster[0] if cluster else None),
        "batches_per_shard": 2,
        "progress": end_in_the_middle,
    }
    if command == "predict":
        predict_files(work, Path(target), **options)
    else:
        every_batch = ProgressFile(Path(target), interval_seconds=0.0, clock=lambda: 0.0)
        evaluate_files(work, progress_file=every_batch, **options)
