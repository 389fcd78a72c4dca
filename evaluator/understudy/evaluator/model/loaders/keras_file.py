"""Loads ``.keras`` files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from understudy.evaluator.model import model_file as files
from understudy.evaluator.model.loaders.loader import BuiltModel


class KerasLoader:
    """See `ModelLoader`.

    Args:
        safe_mode: Whether Keras refuses what it knows to be harmful.
    """

    def __init__(self, *, safe_mode: bool = True) -> None:
        self._safe_mode = safe_mode

    def architecture_of(self, model_file: Path) -> str:
        """See `ModelLoader`."""
        return files.architecture_of(model_file)

    def build(self, model_file: Path) -> BuiltModel:
        """See `ModelLoader`."""
        model = files.build_model(model_file, safe_mode=self._safe_mode)
        return BuiltModel(model=model, compile_config=files.read_compile_config(model_file))

    def assign(self, model: Any, model_file: Path) -> bool:
        """See `ModelLoader`."""
        files.assign_weights(model, model_file)
        return True
