"""Which task each output of a model does, by the loss that it is compiled with, else by the metrics."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from understudy.evaluator.types import OutputTask, ScoreKind, TaskKind

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


_METRICS: Sequence[tuple[frozenset[str], TaskKind, ScoreKind]] = (
    (frozenset({"binary_accuracy", "binary_crossentropy", "binary_io_u"}), "binary", "probabilities"),
    (
        frozenset(
            {
                "sparse_categorical_accuracy",
                "sparse_categorical_crossentropy",
                "sparse_top_k_categorical_accuracy",
                "sparse_top_kcategorical_accuracy",
            }
        ),
        "sparse",
        "unknown",
    ),
    (
        frozenset(
            {
                "categorical_accuracy",
                "categorical_crossentropy",
                "top_k_categorical_accuracy",
                "top_kcategorical_accuracy",
            }
        ),
        "categorical",
        "unknown",
    ),
)
"""Metrics that are for one task only, and what they take the values of an output for."""


def output_tasks(
    losses: Any, names: Sequence[str], widths: Sequence[int | None], metrics: Sequence[Any] = ()
) -> Mapping[str, OutputTask]:
    """Return the task of each output.

    Args:
        losses: The argument ``loss`` of `compile`, with losses, functions, names or their serialized forms as leaves.
        names: The names of the outputs, in order.
        widths: The length of the last axis of each output; None if it is unknown.
        metrics: The arguments ``metrics`` and ``weighted_metrics`` of `compile`, with leaves like those of ``loss``.
    """
    tasks = {
        name: _task(loss, width) for name, loss, width in zip(names, _by_output(losses, names), widths, strict=True)
    }
    measured = [metric for each in metrics for metric in _metrics_by_output(each, names)]
    return {
        name: _task_by_metrics(task, [metric for output, metric in measured if output == name], width)
        if task.kind == "unknown"
        else task
        for (name, task), width in zip(tasks.items(), widths, strict=True)
    }


def _metrics_by_output(metrics: Any, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the metrics of each output, with its name."""
    if _is_by_name(metrics):
        by_output: Iterable[tuple[str, Any]] = _named(metrics, names)
    elif len(names) == 1:
        by_output = [(names[0], metrics)]
    else:
        by_output = zip(names, metrics, strict=False) if isinstance(metrics, list | tuple) else ()
    for name, given in by_output:
        yield from ((name, leaf) for leaf in _leaves(given))


def _is_by_name(given: Any) -> bool:
    """Return whether an argument of `compile` is a dict by outputs, not a serialized loss or metric."""
    return isinstance(given, Mapping) and "class_name" not in given


def _named(given: Mapping[str, Any], names: Sequence[str], place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what a dict, which may hold others, gives for each output, with the output's name."""
    for key, inner in given.items():
        path = f"{place}{key}"
        if _is_by_name(inner):
            yield from _named(inner, names, f"{path}/")
        else:
            yield path if path in names else key, inner


def _leaves(given: Any) -> Iterator[Any]:
    """Yield the losses or metrics of an argument of `compile` in the order of the outputs."""
    if isinstance(given, list | tuple):
        for each in given:
            yield from _leaves(each)
    elif _is_by_name(given):
        for key in sorted(given):
            yield from _leaves(given[key])
    elif given is not None:
        yield given


def _task_by_metrics(task: OutputTask, metrics: Sequence[Any], width: int | None) -> OutputTask:
    described = [_described(metric) for metric in metrics]
    for known, kind, scores in _METRICS:
        found = [from_logits for name, from_logits in described if name in known]
        if found:
            is_of_labels = kind == "binary" and width not in {1, None}
            given: ScoreKind = "logits" if any(found) else scores
            return OutputTask(kind="multilabel" if is_of_labels else kind, scores=given, loss=task.loss)
    return task


def _by_output(losses: Any, names: Sequence[str]) -> Sequence[Any]:
    if _is_by_name(losses):
        leaves = list(losses.values())
        in_order = leaves if len(leaves) == len(names) and not any(map(_is_by_name, leaves)) else [None] * len(names)
        named = dict(_named(losses, names))
        return [named.get(name, other) for name, other in zip(names, in_order, strict=True)]
    if isinstance(losses, list | tuple):
        leaves = list(losses if len(losses) == len(names) else _leaves(losses))
        return leaves if len(leaves) == len(names) and not any(map(_is_by_name, leaves)) else [None] * len(names)
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
