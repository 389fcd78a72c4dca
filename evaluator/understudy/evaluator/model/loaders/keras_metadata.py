"""The losses and metrics that Keras 2 saves beside a SavedModel, in ``keras_metadata.pb``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from understudy.checkpoints.formats.saved_model import KERAS_METADATA_FILE
from understudy.evaluator.evaluator_errors import LoadError
from understudy.evaluator.model.architecture import renumbered_metrics
from understudy.evaluator.model.loaders.keras_2 import UntranslatableError, output_names, translated_compilation

_LARGEST_BYTES: Final = 2**25
_ROOT: Final = "root"


def read_compilation(folder: Path) -> dict[str, Any]:
    """Return the serialized arguments of ``compile``, translated for Keras 3; empty if there are none.

    Raises:
        LoadError: The file is damaged, or too large.
    """
    file = folder / KERAS_METADATA_FILE
    if not file.is_file():
        return {}
    if file.stat().st_size > _LARGEST_BYTES:
        raise LoadError(
            f"{KERAS_METADATA_FILE} has {file.stat().st_size} bytes; at most {_LARGEST_BYTES} were expected"
        )
    try:
        nodes = SavedMetadata.FromString(file.read_bytes()).nodes
        model: dict[str, Any] = next(
            (_with_lists(json.loads(node.metadata)) for node in nodes if node.node_path == _ROOT), {}
        )
        training = model.get("training_config")
        return {} if not training else renumbered_metrics(_by_output(translated_compilation(training, model), model))
    except (AttributeError, DecodeError, KeyError, TypeError, ValueError, RecursionError, UntranslatableError) as error:
        raise LoadError(f"{KERAS_METADATA_FILE} is not as Keras 2 writes it: {error}") from error


def _by_output(compilation: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments that are lists for several outputs by the output: a SavedModel has them by name."""
    outputs = output_names(model)
    return {
        name: dict(zip(outputs, value, strict=True))
        if isinstance(value, list) and len(value) == len(outputs) > 1
        else value
        for name, value in compilation.items()
    }


def _with_lists(value: Any) -> Any:
    """Return a JSON value with lists for tuples."""
    if isinstance(value, dict):
        if value.get("class_name") == "__tuple__":
            return _with_lists(value["items"])
        return {name: _with_lists(item) for name, item in value.items()}
    return [_with_lists(item) for item in value] if isinstance(value, list) else value


def _message() -> Any:
    """Return the class of the message in the file. TensorFlow has it only in its copy of Keras 2, which is large."""
    field = descriptor_pb2.FieldDescriptorProto
    node = descriptor_pb2.DescriptorProto(
        name="SavedObject",
        field=[
            field(name="node_path", number=3, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL),
            field(name="metadata", number=5, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL),
        ],
    )
    nodes = field(
        name="nodes",
        number=1,
        type=field.TYPE_MESSAGE,
        label=field.LABEL_REPEATED,
        type_name="understudy.keras_2.SavedObject",
    )
    file = descriptor_pb2.FileDescriptorProto(
        name="understudy/keras_2.proto",
        package="understudy.keras_2",
        syntax="proto3",
        message_type=[node, descriptor_pb2.DescriptorProto(name="SavedMetadata", field=[nodes])],
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("understudy.keras_2.SavedMetadata"))


SavedMetadata: Final = _message()
