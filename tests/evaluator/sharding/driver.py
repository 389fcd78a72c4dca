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
from understudy.evaluator.sharding.progress_file import ProgressFile
from understudy.evaluator.sharding.work import DataSource, ModelSource, Work


def make_pool(work: Work, cluster: str | None) -> Any:
    if cluster is not None:
        from understudy.evaluator.sharding.ray_pool import RayPool

        return RayPool(pickle.dumps(work), work.model.folder, address=cluster)
    from understudy.evaluator.sharding.local_pool import LocalPool

    return LocalPool(work, workers=2)


def end_in_the_middle(scored: int, total: int | None) -> None:
    assert total is not None
    if scored > total // 2:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    checkpoint, data, progress_file, *cluster = sys.argv[1:]
    model = ModelSource(folder=Path(checkpoint), digest=open_local_checkpoint(Path(checkpoint)).digest)
    evaluate_files(
        Work(model=model, data=DataSource(name="data", paths=(Path(data),)), batch_size=8),
        step=7,
        make_pool=lambda work: make_pool(work, cluster[0] if cluster else None),
        batches_per_shard=2,
        progress=end_in_the_middle,
        progress_file=ProgressFile(
            Path(progress_file), interval_seconds=0.0, clock=lambda: 0.0
        ),  # which writes it after each batch
    )
