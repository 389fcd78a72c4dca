"""The location of an evaluator's checkpoints and data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class CheckpointLocation:
    """The location of the checkpoints and of the data to score them on.

    Attributes:
        folder: A run folder of the trainer, or a folder that another program writes checkpoints to.
        is_run: Whether it is a run folder.
        experiment: The argument for `understudy.experiments.load_experiment`, or None.
        eval_data: Paths for `understudy.evaluator.datasets.dataset_files.open_dataset`, by the name of the dataset.
    """

    folder: Path
    is_run: bool
    experiment: str | None = None
    eval_data: Mapping[str, Path] = field(default_factory=dict)

    @property
    def url(self) -> str | None:
        """The folder as a URL, or None for a local folder. A `Path` made from a URL has lost one of its slashes."""
        match = re.match(r"([a-z][a-z0-9+.-]+):/+", str(self.folder))
        return None if match is None else f"{match[1]}://{str(self.folder)[match.end() :]}"
