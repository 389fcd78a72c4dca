"""Runs first in every Python that a test starts, and nearly halves the time to import TensorFlow.

This folder is on their PYTHONPATH (see tests/conftest.py). Keras imports scikit-learn and matplotlib if it finds them.
They are installed for the bundled digits and the benchmarks' plots. A server-only installation has neither, so they are
hidden from Keras here; other imports find them. While TensorFlow is imported, garbage collection is off.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

_OPTIONAL_TO_KERAS = ("sklearn", "matplotlib")


class _Uncollected(SourceFileLoader):
    """Executes a module without garbage collection."""

    def exec_module(self, module: ModuleType) -> None:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            super().exec_module(module)
        finally:
            if was_enabled:
                gc.enable()


class _QuickStart:
    """A finder that runs before the others."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, _: ModuleType | None = None, /) -> ModuleSpec | None:
        """Find TensorFlow; raise ModuleNotFoundError for Keras' optional imports."""
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

if _preloaded := os.environ.get("TESTS_PRELOADED"):
    from handover import hand_over  # type: ignore[import-not-found] # beside this file

    hand_over(_preloaded)
