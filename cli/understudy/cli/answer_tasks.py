"""What the outputs of a server's version are for, in the evaluator's terms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from understudy.clients import ReplayedModel
    from understudy.evaluator.types import OutputTask


def answer_tasks(model: ReplayedModel) -> Mapping[str, OutputTask]:
    """Return the task of each output, by its name."""
    from understudy.evaluator.types import OutputTask

    return {
        name: OutputTask(
            kind="sparse" if task.kind == "multiclass" else task.kind,
            scores="probabilities" if task.threshold else "unknown",
        )
        for name, task in model.output_tasks.items()
    }
