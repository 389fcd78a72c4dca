"""Loads ``.keras`` files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from understudy.evaluator.model import model_file as files
from understudy.evaluator.model.loaders.loader import BuiltModel


class KerasLoader:
    """See `ModelLoader`."""

    def architecture_of(self, model_file: Path) -> str:
        """See `ModelLoader`."""
        return files.architecture_of(model_file)

    def build(self, model_file: Path) -> BuiltModel:
        """See `ModelLoader`."""
        return BuiltModel(model=files.build_model(model_file), compile_config=files.read_compile_config(model_file))

    def assign(self, model: Any, model_file: Path) -> bool:
        """See `ModelLoader`."""
        files.assign_weights(model, model_file)
        return True
