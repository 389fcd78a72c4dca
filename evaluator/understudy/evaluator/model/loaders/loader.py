"""The interface of a loader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


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
