"""Where an evaluator's checkpoints and data come from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class CheckpointLocation:
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

    @property
    def url(self) -> str | None:
        """The folder as a URL, if that is what it is. A `Path` made of a URL has lost one of its slashes."""
        match = re.match(r"([a-z][a-z0-9+.-]+):/+", str(self.folder))
        return None if match is None else f"{match[1]}://{str(self.folder)[match.end() :]}"
