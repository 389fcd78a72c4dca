"""Says which loss or metric targets do not fit, in place of the error of an operation within it.

Each is traced by itself with the shapes of the batch's examples. Nothing is computed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from understudy.checkpoints.signature import TensorSpec
from understudy.compat import compiled_loss, compiled_metrics, metrics_with_values
from understudy.compat.error_texts import first_line

UNFIT = (ValueError, TypeError, KeyError, IndexError, AttributeError)
"""What Keras and TensorFlow raise while they trace values that do not fit."""

_CLASS_NUMBERS = (
    keras.metrics.SparseCategoricalAccuracy,
    keras.metrics.SparseCategoricalCrossentropy,
    keras.metrics.SparseTopKCategoricalAccuracy,
)
_COLUMNS = (keras.metrics.FBetaScore, keras.metrics.R2Score)

_SPARSE = "sparse_"
"""How the names of losses on class numbers begin."""

_OF_NODE = " for '{{node "
"""What follows in an error is about an operation, whose shapes are said in other words."""

_EXAMPLES = 97
"""A number of examples that hardly any other axis has, so that nothing fits by chance."""


class Misfits:
    """Finds the loss or the metric that batches do not fit, and remembers the last answer. Thread-safe.

    Args:
        model: The compiled model.
        has_loss: Whether its loss counts.
        output_names: The names of its outputs. The loss of a single one can be named.
        predict: Returns its outputs from its inputs, the outputs that are known, and their masks.
    """

    def __init__(self, model: Any, *, has_loss: bool, output_names: Sequence[str], predict: Callable[..., Any]) -> None:
        self._loss = compiled_loss(model) if has_loss else None
        self._output_name, *others = output_names
        self._loss_name = "" if others else _loss_name(model.loss)
        self._metrics = compiled_metrics(model)
        self._predict = predict
        self._last: tuple[tuple[Any, ...], str] = (), ""

    def find(self, arguments: Sequence[Any]) -> str:
        """Return why the targets of a batch do not fit the loss or a metric; empty if they fit each of them.

        Args:
            arguments: The inputs, targets, weights, outputs and masks of a batch, or their specifications.
        """
        leaves = [leaf for leaf in tf.nest.flatten(arguments) if leaf is not None]
        forms = tuple((tf.as_dtype(leaf.dtype), *leaf.shape[1:]) for leaf in leaves)
        if self._last[0] != forms:  # a caller may try the same again and again, and tracing takes a while
            self._last = forms, self._trace(arguments)
        return self._last[1]

    def _trace(self, arguments: Sequence[Any]) -> str:
        found: list[str] = []

        def trace(inputs: Any, targets: Any, weights: Any, outputs: Any, masks: Any) -> None:
            with keras.StatelessScope(collect_losses=True):
                found.extend(self._found(targets, self._predict(inputs, outputs, masks), weights))

        specs = tf.nest.map_structure(_spec, tuple(arguments))
        try:
            tf.function(trace, autograph=False).get_concrete_function(*specs)
        except UNFIT:  # the targets have another structure than the outputs
            return ""
        return found[0] if found else ""

    def _found(self, targets: Any, predictions: Any, weights: Any) -> Iterator[str]:
        if self._loss is not None and (why := _error(self._loss, targets, predictions, weights)):
            of_weights = weights is not None and not _error(self._loss, targets, predictions)
            loss = f"the model's loss {self._loss_name!r}" if self._loss_name else "the model's loss"
            what = f"the {'sample weights' if of_weights else 'targets'} do not fit {loss}"
            helps = _loss_takes(self._loss_name, predictions) if self._loss_name and not of_weights else ""
            yield _said(what, why, targets, predictions, weights) + helps
        if self._metrics is None:
            return
        for metric, output, target, prediction in metrics_with_values(self._metrics, targets, predictions):
            if why := _error(metric.update_state, target, prediction):
                what = f"the targets of {output or self._output_name!r} do not fit the metric {metric.name!r}"
                of_classes = self._loss_name.startswith(_SPARSE) or target.dtype.is_integer
                helps = _remedy(metric, target, prediction, of_classes=of_classes)
                yield f"{_said(what, why, target, prediction)}; {helps}"


def said_of_own_code(
    model: Any, error: BaseException, targets: Any, weights: Any, outputs: Sequence[TensorSpec]
) -> str:
    """Return why code of the model's own, which may read anything of a batch, does not score it.

    Args:
        model: The model, with a ``test_step`` or ``compute_loss`` of its own.
        error: What it raised.
        targets: The targets of the batch, or their specifications.
        weights: Its sample weights, likewise; None without.
        outputs: The specifications of the model's outputs.
    """
    own = "compute_loss" if type(model).test_step is keras.Model.test_step else "test_step"
    of_outputs = [tf.TensorSpec(spec.shape, spec.dtype) for spec in outputs]
    targets, weights = (tf.nest.map_structure(_spec, leaves) for leaves in (targets, weights))
    shown = _shapes_of(targets, of_outputs, weights)
    batch = "the batch" if any(leaf is not None for leaf in tf.nest.flatten(targets)) else "a batch without targets"
    return f"the model's own {own} cannot score {batch} ({shown}): {first_line(error).partition(_OF_NODE)[0]}"


def _spec(leaf: Any) -> Any:
    return None if leaf is None else tf.TensorSpec([_EXAMPLES, *leaf.shape[1:]], tf.as_dtype(leaf.dtype))


def _loss_takes(name: str, predictions: Any) -> str:
    (of_output,) = (list(leaf.shape[1:]) for leaf in tf.nest.flatten(predictions))
    if name.startswith(_SPARSE):
        return f"; it takes class numbers of the shape {_shape(of_output[:-1])}"
    is_of_keras = hasattr(keras.losses, name.removesuffix("_loss"))
    return f"; it takes targets of the outputs' shape {_shape(of_output)}" if is_of_keras else ""


def _loss_name(loss: Any) -> str:
    """Return the name of a loss argument of `keras.Model.compile` for one output; empty if it is for several."""
    if isinstance(loss, str):
        return loss
    name = getattr(loss, "name", None) or getattr(loss, "__name__", "")
    return name if isinstance(name, str) else ""


def _error(call: Callable[..., Any], *arguments: Any) -> str:
    try:
        call(*arguments)
    except UNFIT as error:
        return first_line(error)
    return ""


def _said(what: str, why: str, targets: Any, predictions: Any, weights: Any = None) -> str:
    """Return a sentence with the shapes, and with what an error says beyond them."""
    shown = f"{what} ({_shapes_of(targets, predictions, weights)})"
    tells_shapes = any(int(number) % _EXAMPLES == 0 for number in re.findall(r"[1-9]\d*", why))
    return shown if tells_shapes else f"{shown}: {why}"


def _shapes_of(targets: Any, outputs: Any, weights: Any) -> str:
    weighted = "" if weights is None else f"; sample weights: {_shown(weights)}"
    return f"targets: {_shown(targets)}; outputs: {_shown(outputs)}{weighted}"


def _shown(values: Any) -> str:
    shown = [leaf.dtype.name + _shape(leaf.shape[1:]) for leaf in tf.nest.flatten(values) if leaf is not None]
    return ", ".join(shown) or "none"


def _shape(of_example: Sequence[int | None]) -> str:
    return f"[{', '.join(map(str, ('examples', *of_example)))}]"


def _remedy(metric: Any, target: Any, prediction: Any, *, of_classes: bool) -> str:
    """Return what the metric takes, and what helps; ``of_classes`` says that targets may be class numbers."""
    of_target, of_output = list(target.shape[1:]), list(prediction.shape[1:])
    if target.dtype == tf.string:
        return "it takes numbers, and these are text"
    if isinstance(metric, _CLASS_NUMBERS):
        return (
            f"it takes class numbers of the shape {_shape(of_output[:-1])}; for one-hot targets, use a metric such as "
            "'CategoricalAccuracy'"
        )
    if isinstance(metric, _COLUMNS) and len(of_output) != 1:
        return "it takes targets and outputs of the shape [examples, values]; use another metric"
    takes = f"it takes targets of the outputs' shape {_shape(of_output)}"
    if of_classes and of_output[-1:] != [1] and of_target in (of_output[:-1], [*of_output[:-1], 1]):
        return f"{takes}; for class numbers, give one-hot targets or use a metric such as 'SparseCategoricalAccuracy'"
    return takes
