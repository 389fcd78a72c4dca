"""What a loader is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class BuiltModel:
    """A Keras model that is not compiled, and the serialized arguments to compile it with; none if there are none."""

    model: Any
    compile_config: Mapping[str, Any] = field(default_factory=dict)


class ModelLoader(Protocol):
    """Knows one way to store a model. Thread-safe.

    ``model_file`` is what `understudy.checkpoints.local_checkpoint.LocalCheckpoint.model_file` says.
    """

    def architecture_of(self, model_file: Path) -> str:
        """Return a fingerprint of all that makes one slot unfit for another checkpoint.

        Raises:
            LoadError: The file cannot be read.
        """

    def build(self, model_file: Path) -> BuiltModel:
        """Build the model with its weights in the current strategy's scope.

        Raises:
            LoadError: The file is damaged, or holds what cannot be built.
        """

    def assign(self, model: Any, model_file: Path) -> Any:
        """Give a model that was built from a checkpoint of the same architecture the weights of this one.

        To be called in the strategy's scope.

        Returns:
            The model to use from now on: the same one, or another that takes its place.

        Raises:
            LoadError: The file is damaged. Some variables may have been assigned.
        """
