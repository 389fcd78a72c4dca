"""Loads checkpoints that hold only variables into the model that the user's experiment builds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

from understudy.checkpoints.kinds import ModelKind
from understudy.compat import parse_object_graph, take_apart
from understudy.evaluator.evaluator_errors import LoadError, first_line
from understudy.evaluator.model.loaders.loader import BuiltModel
from understudy.evaluator.model.weights import assign_from_hdf5

_OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"


class VariablesLoader:
    """See `ModelLoader`.

    Args:
        kind: How the variables are stored.
        build_model: Builds the model.
        assign: Assigns the variables of a file to a model; may raise anything.
    """

    def __init__(self, kind: ModelKind, build_model: Callable[[], Any], assign: Callable[[Any, Path], None]) -> None:
        self._kind = kind
        self._build_model = build_model
        self._assign = assign

    def architecture_of(self, model_file: Path) -> str:
        """See `ModelLoader`. The model is always the experiment's."""
        del model_file
        return f"the experiment's, of {self._kind.value}"

    def build(self, model_file: Path) -> BuiltModel:
        """See `ModelLoader`."""
        try:
            built = _taken_apart(self._build_model())
        except Exception as error:
            raise LoadError(f"the experiment's model cannot be built: {first_line(error)}") from error
        self.assign(built.model, model_file)
        return built

    def assign(self, model: Any, model_file: Path) -> bool:
        """See `ModelLoader`."""
        try:
            self._assign(model, model_file)
        except Exception as error:
            raise LoadError(
                f"the variables of {model_file.name} are not those of the experiment's model: {first_line(error)}; "
                "start the evaluator with the experiment that builds theirs, and it tries them again"
            ) from error
        return True


def assign_weights(model: Any, model_file: Path) -> None:
    """Assign the content of a ``.weights.h5`` file."""
    assign_from_hdf5(model, model_file)


def assign_checkpoint(model: Any, prefix: Path) -> None:
    """Assign a checkpoint of `tf.train.Checkpoint`: of the model itself, or of an object that contains the model.

    Raises:
        ValueError: No object in it has all the variables of the model.
    """
    reasons = []
    for checkpoint in _roots(model, prefix):
        try:
            checkpoint.read(str(prefix)).expect_partial().assert_existing_objects_matched()
        except AssertionError as error:
            reasons.append(first_line(error))
            continue
        return
    raise ValueError("; ".join(reasons))


def _roots(model: Any, prefix: Path) -> Iterator[tf.train.Checkpoint]:
    """Yield the ways in which a checkpoint may contain the model, the likeliest first."""
    graph = parse_object_graph(tf.train.load_checkpoint(str(prefix)).get_tensor(_OBJECT_GRAPH))
    names = [child.local_name for child in graph.nodes[0].children]
    if "model" in names:
        yield tf.train.Checkpoint(model=model)
    yield tf.train.Checkpoint(model)
    for name in names:
        if name.isidentifier() and not name.startswith("_") and name not in {"model", "save_counter", "optimizer"}:
            yield tf.train.Checkpoint(**{name: model})


def _taken_apart(model: Any) -> BuiltModel:
    """Return the model without its compilation, and its compile arguments."""
    config = model.get_compile_config() if model.compiled else None
    take_apart(model)
    return BuiltModel(model=model, compile_config=config or {})
