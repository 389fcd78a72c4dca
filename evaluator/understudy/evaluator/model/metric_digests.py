"""What identifies the configuration of each metric of a model, so that only like values are compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras

_OF_THE_PROCESS = frozenset({"shared_object_id", "build_config"})
"""Keys of serialized objects that do not belong to their configuration."""


def digest_of(config: Any) -> str:
    """Return a SHA-256 of JSON values; of other values, only the type counts."""
    text = json.dumps(config, sort_keys=True, default=lambda value: type(value).__qualname__)
    return hashlib.sha256(text.encode()).hexdigest()


def without_names(config: Any) -> Any:
    """Return a serialized object without the names that Keras numbers in each process."""
    if isinstance(config, Mapping):
        is_object = "class_name" in config and isinstance(config.get("config"), Mapping)
        inner = {name: each for name, each in config["config"].items() if name != "name"} if is_object else None
        return {name: without_names(inner if is_object and name == "config" else each) for name, each in config.items()}
    return [without_names(each) for each in config] if isinstance(config, list | tuple) else config


def metric_digests(named: Iterable[tuple[str, Any]], *, loss: str, loss_digest: str) -> dict[str, str]:
    """Return the digest of each metric's configuration, by the name that it has in a result.

    Args:
        named: What `named_metrics` yields.
        loss: The name of the loss.
        loss_digest: Identifies the losses: for the means of the losses, which are configured alike.
    """
    own = {name: loss_digest if is_loss(metric, loss) else _digest(metric) for name, metric in named}
    return {loss: loss_digest, **own}


def is_loss(metric: Any, loss: str) -> bool:
    """Return whether a metric is the mean of the loss, or of an output's, given the name of the loss."""
    return type(metric) is keras.metrics.Mean and metric.name.endswith(loss)


def flattened(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values of a result by name, those of metrics with several values by their own names, as Keras does."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flattened(value)
        else:
            yield name, value


def named_metrics(metrics: Iterable[Any], compiled: Any) -> Iterator[tuple[str, Any]]:
    """Yield metrics with the names that they have in a result. Call it in a scope in which they have a state.

    Args:
        metrics: The metrics of a model.
        compiled: The one among them that holds those given to `compile`; None if there is none.
    """
    for metric in metrics:
        result = metric.result()
        if metric is compiled:  # it names its metrics after the outputs, in their order
            within = list(metric.metrics)
            own = zip(result.items(), within, strict=True) if len(result) == len(within) else ()
            yield from ((name, each) for value, each in own for name, _ in flattened(dict([value])))
        else:
            yield from ((name, metric) for name, _ in flattened({metric.name: result}))


def _digest(metric: Any) -> str:
    try:
        config = keras.saving.serialize_keras_object(metric)
    except Exception:  # noqa: BLE001 - a user's `get_config` may raise anything
        config = {}
    if not isinstance(config, Mapping):
        config = {"config": config}
    kind = type(metric)
    return digest_of([kind.__module__, kind.__qualname__, without_names(_stable(config))])


def _stable(config: Any) -> Any:
    if isinstance(config, Mapping):
        return {key: _stable(each) for key, each in config.items() if key not in _OF_THE_PROCESS}
    return [_stable(each) for each in config] if isinstance(config, list | tuple) else config
