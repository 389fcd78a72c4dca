"""What a comparison gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from understudy.evaluator.comparison.bootstrap import BootstrapOptions, LossDifference
from understudy.evaluator.types import EvaluationResult


@dataclass(frozen=True, kw_only=True)
class ComparedVersion:
    """One version beside the first.

    Attributes:
        score: Its loss and metrics, as an evaluation of it alone gives them.
        differences: By how much each metric exceeds the first version's.
        loss_difference: The same of the mean example loss, with its interval; None for the first version, and where
            examples have no losses of their own.
    """

    score: EvaluationResult
    differences: Mapping[str, float]
    loss_difference: LossDifference | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Versions on the same batches.

    Attributes:
        versions: In the order in which they were asked for; the first is what the others are held against.
        bootstrap: How the intervals were made.
        notes: Why there is no interval, or why versions were scored in turns.
    """

    versions: tuple[ComparedVersion, ...]
    bootstrap: BootstrapOptions
    notes: tuple[str, ...]
