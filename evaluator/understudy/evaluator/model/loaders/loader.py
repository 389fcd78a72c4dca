"""The interface of a loader, and the check of a checkpoint's files before Keras or TensorFlow reads them."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import tensorflow as tf

from understudy.checkpoints.checkpoint_errors import DamagedCheckpointError
from understudy.checkpoints.inspection import inspect_structure
from understudy.checkpoints.kinds import ModelKind
from understudy.evaluator.evaluator_errors import LoadError
from understudy.evaluator.model.allowlists import check_config, check_operations
from understudy.evaluator.model.loaders.stored_config import SAVE_DIFFERENTLY, StoredConfig, read_archive, read_hdf5


@dataclass(frozen=True, kw_only=True)
class BuiltModel:
    """A Keras model that is not compiled, and its serialized compile arguments; empty if there are none."""

    model: Any
    compile_config: Mapping[str, Any] = field(default_factory=dict)


class ModelLoader(Protocol):
    """Loads one kind of stored model. Thread-safe.

    ``model_file`` is `understudy.checkpoints.local_checkpoint.LocalCheckpoint.model_file`.
    """

    def architecture_of(self, model_file: Path) -> str:
        """Return a fingerprint; checkpoints with equal fingerprints fit the same slot.

        Raises:
            LoadError: The file cannot be read.
        """

    def build(self, model_file: Path) -> BuiltModel:
        """Build the model with its weights in the current strategy's scope.

        Raises:
            LoadError: The file is damaged, or its model cannot be built.
        """

    def assign(self, model: Any, model_file: Path) -> bool:
        """Assign a checkpoint's weights to a model that was built from one of the same architecture.

        Call this in the strategy's scope.

        Returns:
            Whether they were assigned; False if checkpoints of this kind bring their own functions, so that each must
            be built.

        Raises:
            LoadError: The file is damaged. Some variables may have been assigned.
        """


_REMEMBERED = 64

_EXPANSION = 4
_SPARE_BYTES = 2**26
"""The variables of a model may take this many times the bytes of its file, and as many bytes more."""

_Stamp = tuple[str, int, int, int]


class CheckedLoader:
    """See `ModelLoader`. Another loader, whose files are checked before it reads them.

    The sizes and references of the files are checked in another process. Then what a Keras configuration names, or a
    SavedModel executes, is compared with what is accepted. A file that was found good is checked again when it changes.

    Args:
        loader: The other loader.
        kind: How the model is stored.
        allow_unsafe_models: Whether any class, function and operation is accepted. Sizes and references are checked
            nevertheless.
    """

    def __init__(self, loader: ModelLoader, kind: ModelKind, *, allow_unsafe_models: bool) -> None:
        self._loader = loader
        self._kind = kind
        self._allow_unsafe_models = allow_unsafe_models

    def architecture_of(self, model_file: Path) -> str:
        """See `ModelLoader`."""
        self._check(model_file)
        return self._loader.architecture_of(model_file)

    def build(self, model_file: Path) -> BuiltModel:
        """See `ModelLoader`."""
        self._check(model_file)
        if self._kind not in (ModelKind.KERAS, ModelKind.HDF5):
            return self._loader.build(model_file)
        with _bounded_variables(model_file):
            return self._loader.build(model_file)

    def assign(self, model: Any, model_file: Path) -> Any:
        """See `ModelLoader`."""
        self._check(model_file)
        return self._loader.assign(model, model_file)

    def _check(self, model_file: Path) -> None:
        _check(self._kind, model_file, _stamps(self._kind, model_file), self._allow_unsafe_models)


@functools.lru_cache(maxsize=_REMEMBERED)
def _check(kind: ModelKind, model_file: Path, stamps: tuple[_Stamp, ...], allow_unsafe_models: bool) -> None:  # noqa: FBT001 - a key of the cache
    """Check the files of a model in their state given by ``stamps``."""
    del stamps
    try:
        found = inspect_structure(kind, model_file)
    except DamagedCheckpointError as error:
        raise LoadError(str(error)) from error
    if not allow_unsafe_models:
        _CHECKS.get(kind, _accept)(model_file, found)


def _check_archive(model_file: Path, _: Mapping[str, Any]) -> None:
    _check_stored(read_archive(model_file), model_file)


def _check_hdf5(model_file: Path, _: Mapping[str, Any]) -> None:
    _check_stored(read_hdf5(model_file), model_file)


def _check_stored(stored: StoredConfig, model_file: Path) -> None:
    advice = f"it was saved by Keras 2: {SAVE_DIFFERENTLY}" if stored.is_translated else ""
    check_config([stored.model, stored.compilation], model_file.name, advice=advice)


def _check_saved_model(model_file: Path, found: Mapping[str, Any]) -> None:
    check_operations(found, model_file.name)


def _accept(*_: object) -> None:
    """Accept variables: what they mean is up to the experiment's own model."""


_CHECKS: Mapping[ModelKind, Callable[[Path, Mapping[str, Any]], None]] = {
    ModelKind.KERAS: _check_archive,
    ModelKind.HDF5: _check_hdf5,
    ModelKind.SAVED_MODEL: _check_saved_model,
}


def _stamps(kind: ModelKind, model_file: Path) -> tuple[_Stamp, ...]:
    """Return what changes when a file of the model is written or replaced."""
    files = model_file.rglob("*") if kind is ModelKind.SAVED_MODEL else model_file.parent.glob(f"{model_file.name}*")
    stats = ((str(path), path.stat()) for path in sorted(files))
    return tuple((path, stat.st_ino, stat.st_size, stat.st_mtime_ns) for path, stat in stats)


@contextmanager
def _bounded_variables(model_file: Path) -> Iterator[None]:
    """Refuse to create variables that are much larger than the file, which would hold their values."""
    limit = _SPARE_BYTES + _EXPANSION * model_file.stat().st_size
    total = 0

    def create(next_creator: Callable[..., Any], **arguments: Any) -> Any:
        nonlocal total
        total += _size_of(arguments["initial_value"])
        if total > limit:
            raise LoadError(
                f"the model of {model_file.name} has variables of {total} bytes or more; its file can hold the values "
                f"of at most {limit}"
            )
        return next_creator(**arguments)

    with tf.variable_creator_scope(create):
        yield


def _size_of(initial_value: Any) -> int:
    """Return the bytes of a variable that Keras is about to create; its initializer is a closure over the variable."""
    if not inspect.isfunction(initial_value):
        return 0
    variable = inspect.getclosurevars(initial_value).nonlocals.get("self")
    shape, dtype = getattr(variable, "shape", None), getattr(variable, "dtype", None)
    if shape is None or dtype is None:
        return 0
    return math.prod(int(length or 0) for length in shape) * int(tf.as_dtype(dtype).size)
