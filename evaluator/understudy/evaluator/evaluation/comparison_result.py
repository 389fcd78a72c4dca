"""The result of a comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from understudy.evaluator.evaluation.bootstrap import BootstrapOptions, LossDifference
from understudy.evaluator.types import EvaluationResult


@dataclass(frozen=True, kw_only=True)
class ComparedVersion:
    """One version compared with the first.

    Attributes:
        score: Its loss and metrics, the same as in an evaluation of this version alone.
        differences: Each metric minus the first version's.
        loss_difference: The difference of the mean example loss, with its interval; None for the first version, and if
            there are no per-example losses.
    """

    score: EvaluationResult
    differences: Mapping[str, float]
    loss_difference: LossDifference | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Versions on the same batches.

    Attributes:
        versions: The versions in the requested order; the others are compared with the first.
        bootstrap: The options of the intervals.
        notes: Why there is no interval, or why versions were scored in turn.
    """

    versions: tuple[ComparedVersion, ...]
    bootstrap: BootstrapOptions
    notes: tuple[str, ...]
