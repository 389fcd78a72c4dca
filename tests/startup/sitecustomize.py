"""Runs first in every Python that a test starts, and has it import TensorFlow in little more than half the time.

This folder is on their PYTHONPATH (see tests/conftest.py). Keras imports scikit-learn and matplotlib if it finds them.
They are here for the bundled digits and the plots of benchmarks; where only the server is installed, Keras does without
them, and so it does here. Whoever else imports them gets them. And while TensorFlow is imported there is no garbage.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

_OPTIONAL_TO_KERAS = ("sklearn", "matplotlib")


class _Uncollected(SourceFileLoader):
    """Executes a module without garbage collection."""

    def exec_module(self, module: ModuleType) -> None:
        gc.disable()
        try:
            super().exec_module(module)
        finally:
            gc.enable()


class _QuickStart:
    """A finder that comes before the others."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, _: ModuleType | None = None, /) -> ModuleSpec | None:
        """Find TensorFlow; raise ModuleNotFoundError if it is Keras that looks for what it can do without."""
        if name in _OPTIONAL_TO_KERAS and _importing_module().startswith("keras."):
            raise ModuleNotFoundError(f"{name} is hidden from Keras in tests", name=name)
        spec = PathFinder.find_spec(name, path) if name == "tensorflow" else None
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Uncollected(spec.loader.name, spec.loader.path)
        return spec


def _importing_module() -> str:
    frame = sys._getframe(2)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("importlib."):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))


sys.meta_path.insert(0, _QuickStart)
