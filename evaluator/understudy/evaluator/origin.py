"""Where an evaluator's checkpoints and data come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where checkpoints and the data to score them on come from.

    Attributes:
        folder: A run folder of our trainer, or a folder that another program writes checkpoints to.
        is_run: Which of the two it is.
        experiment: What `understudy.experiments.load_experiment` takes, or None.
        eval_data: What `understudy.evaluator.dataset_files.open_dataset` reads, by the name of the dataset.
    """

    folder: Path
    is_run: bool
    experiment: str | None = None
    eval_data: Mapping[str, Path] = field(default_factory=dict)
