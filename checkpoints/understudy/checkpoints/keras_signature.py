"""The names, types and shapes of a Keras model's inputs and outputs, the same before saving and after loading.

A nested structure is flattened to names: the keys and indices that lead to a tensor, joined by ``/``. A named ``Input``
keeps its name. An output that is not reached through a dict has the name of the layer that computes it. A single
unnamed tensor is ``inputs`` or ``outputs``. The names that Keras generates (``keras_tensor_2``, ``input_layer_1``,
``dense_3``) differ between processes and count as no name.

Functional and sequential models have symbolic tensors. A subclassed model records only the shapes it was built with, so
it is traced to find its outputs. Its inputs are assumed to be float32 unless the trace shows otherwise. Sequences of
integers or strings are assumed to have any length if the model runs on longer ones.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from understudy.checkpoints.signature import Signature, TensorSpec
from understudy.compat import functional_graph, operation_of

_Path = tuple[str | int, ...]
_SEQUENCE_RANK = 2
_CANDIDATE_DTYPES = ("float32", "int32", "string")


class SignatureError(ValueError):
    """A model's inputs or outputs cannot be determined. The text says what is missing and what to do."""


@dataclass(frozen=True, kw_only=True)
class NamedStructure:
    """A nested structure of lists, tuples and dicts with named leaves.

    Attributes:
        template: The structure itself; the values of its leaves are ignored.
        specs: One for each leaf, in the order in which `keras.tree` flattens the template.
    """

    template: Any
    specs: tuple[TensorSpec, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the leaves, in order."""
        return tuple(spec.name for spec in self.specs)

    @property
    def nested_names(self) -> tuple[str, ...]:
        """The names of the leaves below the elements of the structure: within a list or dict in a list or dict."""
        import keras

        paths = (path for path, _ in keras.tree.flatten_with_path(self.template))
        return tuple(name for name, path in zip(self.names, paths, strict=True) if len(path) > 1)

    def flatten(self, value: Any) -> dict[str, Any]:
        """Return the leaves of a structure like the template by their names.

        Raises:
            ValueError: The structure has another number of leaves.
        """
        import keras

        return dict(zip(self.names, keras.tree.flatten(value), strict=True))

    def unflatten(self, leaves: Mapping[str, Any]) -> Any:
        """Return a structure like the template with the given leaves.

        Raises:
            KeyError: A name is missing.
        """
        import keras

        return keras.tree.pack_sequence_as(self.template, [leaves[name] for name in self.names])


@dataclass(frozen=True, kw_only=True)
class ModelInterface:
    """The inputs and outputs of a model, nested as the model nests them.

    ``ragged_inputs`` are the names of those for which Keras takes examples of different lengths in one batch.
    """

    inputs: NamedStructure
    outputs: NamedStructure
    ragged_inputs: tuple[str, ...] = ()

    @property
    def signature(self) -> Signature:
        """The inputs and outputs without the nesting."""
        return Signature(inputs=self.inputs.specs, outputs=self.outputs.specs)


def signature_of(model: Any) -> Signature:
    """Return the signature of a built Keras model; see `interface_of`."""
    return interface_of(model).signature


def interface_of(model: Any) -> ModelInterface:
    """Describe a built Keras model.

    Args:
        model: A functional, sequential or subclassed model that was built, called or loaded.

    Raises:
        SignatureError: The model was never built, or cannot be called on the shapes it was built with.
    """
    graph = functional_graph(model)
    return _interface_of_subclassed(model) if graph is None else _interface_of_functional(graph)


def _interface_of_functional(model: Any) -> ModelInterface:
    inputs = _named(model.input, _input_name, lone="inputs")
    return ModelInterface(
        inputs=inputs,
        outputs=_named(model.output, _output_name, lone="outputs"),
        ragged_inputs=tuple(name for name, tensor in inputs.flatten(model.input).items() if tensor.ragged),
    )


def _interface_of_subclassed(model: Any) -> ModelInterface:
    import keras

    shapes = _build_shapes(model)
    failures = []
    for dtype in _CANDIDATE_DTYPES:
        tensors = _map_shapes(shapes, functools.partial(keras.KerasTensor, dtype=dtype))
        try:
            inputs, outputs = _trace(model, tensors)
            if _takes_longer_sequences(model, inputs):
                inputs, outputs = _trace(model, _with_open_sequences(inputs))
        except (TypeError, ValueError, NotImplementedError) as error:
            failures.append(f"{dtype}: {str(error).strip().splitlines()[0]}")
            continue
        return ModelInterface(
            inputs=_named(inputs, _no_name, lone="inputs"), outputs=_named(outputs, _no_name, lone="outputs")
        )
    raise SignatureError(
        f"The subclassed model {model.name!r} could not be called on the shapes it was built with, {shapes}: "
        f"{'; '.join(failures)}. Make it a functional model with named Inputs."
    )


def _build_shapes(model: Any) -> Any:
    """Return the nested shapes of the first argument a subclassed model was built with."""
    config = model.get_build_config() or {}
    shapes = config.get("input_shape")
    if shapes is None:
        raise SignatureError(
            f"The subclassed model {model.name!r} does not say what it takes: its build configuration is {config}, and "
            "an entry 'input_shape' was expected. Call the model on one batch, given as its first argument, before "
            "saving it."
        )
    return shapes


def _trace(model: Any, tensors: Any) -> tuple[Any, Any]:
    """Return the inputs and outputs of a subclassed model, as tensor-like leaves with shape and dtype."""
    import keras
    import tensorflow as tf

    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in keras.tree.flatten(tensors)]

    def call(*leaves: Any) -> Any:
        return model(keras.tree.pack_sequence_as(tensors, leaves), training=False)

    traced = tf.function(call, autograph=False).get_concrete_function(*specs)
    inputs = [
        keras.KerasTensor(placeholder.shape, dtype=_integer_cast(placeholder) or placeholder.dtype.name)
        for placeholder in traced.inputs[: len(specs)]
    ]
    return keras.tree.pack_sequence_as(tensors, inputs), traced.structured_outputs


def _integer_cast(placeholder: Any) -> str | None:
    """Return the integer type to which a traced model first casts an input, as Embedding does, or None."""
    targets = [consumer.get_attr("DstT") for consumer in placeholder.consumers() if consumer.type == "Cast"]
    return next((str(target.name) for target in targets if target.is_integer), None)


def _is_sequence(tensor: Any) -> bool:
    return len(tensor.shape) == _SEQUENCE_RANK and tensor.shape[1] is not None and not tensor.dtype.startswith("float")


def _with_open_sequences(tensors: Any) -> Any:
    import keras

    return keras.tree.map_structure(
        lambda tensor: keras.KerasTensor((None, None), dtype=tensor.dtype) if _is_sequence(tensor) else tensor, tensors
    )


def _takes_longer_sequences(model: Any, tensors: Any) -> bool:
    """Return whether a model runs on sequences one longer than those it was built with."""
    import keras
    import tensorflow as tf

    if not any(_is_sequence(tensor) for tensor in keras.tree.flatten(tensors)):
        return False
    longer = keras.tree.map_structure(
        lambda tensor: tf.zeros(
            [1, tensor.shape[1] + 1] if _is_sequence(tensor) else [1, *tensor.shape[1:]], tensor.dtype
        ),
        tensors,
    )
    try:
        model(longer, training=False)
    except (TypeError, ValueError, tf.errors.InvalidArgumentError):
        return False
    return True


def _map_shapes(shapes: Any, make: Callable[[Sequence[int | None]], Any]) -> Any:
    """Replace every shape, a sequence of lengths, in a nested structure. Axis 0 becomes None."""
    if isinstance(shapes, Mapping):
        return {key: _map_shapes(value, make) for key, value in shapes.items()}
    if all(length is None or isinstance(length, int) for length in shapes):
        return make((None, *shapes[1:]))
    return [_map_shapes(value, make) for value in shapes]


def _named(structure: Any, own_name: Callable[[_Path, Any], str | None], *, lone: str) -> NamedStructure:
    import keras

    leaves = keras.tree.flatten_with_path(structure)
    paths = ["/".join(map(str, path)) for path, _ in leaves]
    if len(leaves) == 1 and not _has_key(leaves[0][0]):
        paths = [lone]
    own_names = [own_name(path, leaf) for path, leaf in leaves]
    names = [own or joined for own, joined in zip(own_names, paths, strict=True)]
    if len(set(names)) < len(names):
        names, own_names = paths, [None] * len(paths)
    specs = [
        _spec(name, leaf, positional=own is None and not _has_key(path))
        for name, own, (path, leaf) in zip(names, own_names, leaves, strict=True)
    ]
    return NamedStructure(template=keras.tree.map_structure(lambda _: 0, structure), specs=tuple(specs))


def _has_key(path: _Path) -> bool:
    """Return whether the path to a tensor contains a dict key."""
    return any(isinstance(key, str) for key in path)


def _spec(name: str, tensor: Any, *, positional: bool) -> TensorSpec:
    import keras

    return TensorSpec(
        name=name,
        dtype=str(keras.backend.standardize_dtype(tensor.dtype)),
        shape=(None, *tuple(tensor.shape)[1:]),
        positional=positional,
    )


def _input_name(_: _Path, tensor: Any) -> str | None:
    return _given_name(operation_of(tensor))


def _output_name(path: _Path, tensor: Any) -> str | None:
    if _has_key(path):
        return None
    return _given_name(operation_of(tensor))


def _no_name(_: _Path, __: Any) -> str | None:
    return None


def _given_name(operation: Any) -> str | None:
    """Return the name of a layer, or None if Keras generated it."""
    names = _made_up_names(type(operation))
    return None if any(re.fullmatch(rf"{name}(_\d+)?", operation.name) for name in names) else str(operation.name)


def _made_up_names(kind: type) -> Iterator[str]:
    """Yield the stems Keras numbers to name a layer of this class: ``GRUCell`` makes ``gru_cell``."""
    words = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", kind.__name__))
    yield re.escape(re.sub(r"([a-z])([A-Z])", r"\1_\2", words).lower())
    yield "keras_tensor"
