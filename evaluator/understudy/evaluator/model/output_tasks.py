"""Which task each output of a model does, by the loss that it is compiled with."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

TaskKind = Literal["binary", "multilabel", "categorical", "sparse", "regression", "unknown"]
ScoreKind = Literal["probabilities", "logits", "unknown"]

_BINARY = frozenset({"binary_crossentropy", "binary_focal_crossentropy"})
_BINARY_SCORES = frozenset({"hinge", "squared_hinge"})
_CATEGORICAL = frozenset({"categorical_crossentropy", "categorical_focal_crossentropy"})
_CATEGORICAL_SCORES = frozenset({"categorical_hinge", "kl_divergence", "kullback_leibler_divergence"})
_SPARSE = frozenset({"sparse_categorical_crossentropy"})
_REGRESSION = frozenset(
    (
        *("mean_squared_error", "mse", "mean_absolute_error", "mae", "mean_absolute_percentage_error", "mape"),
        *("mean_squared_logarithmic_error", "msle", "huber", "log_cosh", "logcosh", "poisson"),
    )
)


@dataclass(frozen=True, kw_only=True)
class OutputTask:
    """What an output is for.

    Attributes:
        kind: The task. ``sparse`` has the numbers of classes as targets, ``categorical`` one value for each class.
        scores: What the values of a classification are.
        loss: The name of the loss; empty if there is none.
    """

    kind: TaskKind
    scores: ScoreKind = "unknown"
    loss: str = ""


def output_tasks(losses: Any, names: Sequence[str], widths: Sequence[int | None]) -> Mapping[str, OutputTask]:
    """Return the task of each output.

    Args:
        losses: The argument ``loss`` of `compile`, with losses, functions, names or their serialized forms as leaves.
        names: The names of the outputs, in order.
        widths: The length of the last axis of each output; None if it is unknown.
    """
    return {
        name: _task(loss, width) for name, loss, width in zip(names, _by_output(losses, names), widths, strict=True)
    }


def _by_output(losses: Any, names: Sequence[str]) -> Sequence[Any]:
    if isinstance(losses, Mapping) and "class_name" not in losses:
        leaves = list(losses.values())
        in_order = leaves if len(leaves) == len(names) else [None] * len(names)
        return [losses.get(name, other) for name, other in zip(names, in_order, strict=True)]
    if isinstance(losses, list | tuple):
        return losses if len(losses) == len(names) else [None] * len(names)
    return [losses] * len(names)


def _task(loss: Any, width: int | None) -> OutputTask:
    name, from_logits = _described(loss)
    given: ScoreKind = "logits" if from_logits else "probabilities"
    if name in _BINARY or name in _BINARY_SCORES:
        return OutputTask(
            kind="binary" if width in {1, None} else "multilabel",
            scores=given if name in _BINARY else "unknown",
            loss=name,
        )
    if name in _CATEGORICAL or name in _CATEGORICAL_SCORES:
        return OutputTask(kind="categorical", scores=given if name in _CATEGORICAL else "unknown", loss=name)
    if name in _SPARSE:
        return OutputTask(kind="sparse", scores=given, loss=name)
    return OutputTask(kind="regression" if name in _REGRESSION else "unknown", loss=name)


def _described(loss: Any) -> tuple[str, bool]:
    """Return the name of a loss in small letters with underscores, and whether it takes logits."""
    if loss is None:
        return "", False
    config: Mapping[str, Any] = {}
    if isinstance(loss, Mapping):
        given = loss.get("config")
        config = given if isinstance(given, Mapping) else {}
        name = given if isinstance(given, str) else str(loss["class_name"])
    elif isinstance(loss, str):
        name = loss
    elif hasattr(loss, "get_config"):
        name, config = type(loss).__name__, loss.get_config()
    else:
        name = getattr(loss, "__name__", type(loss).__name__)
    snake = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.rpartition(">")[2]).lower()
    return _SHORT.get(snake, snake), bool(config.get("from_logits", False))


_SHORT = {"bce": "binary_crossentropy", "kld": "kl_divergence", "kldivergence": "kl_divergence"}
