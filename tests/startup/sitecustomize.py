"""Runs first in every Python that a test starts, for this folder is on their PYTHONPATH (see tests/conftest.py).

Keras imports scikit-learn and matplotlib if it finds them, which makes a third of what it takes to import TensorFlow.
They are here for the bundled digits and the plots of benchmarks; where only the server is installed, Keras does without
them. So it does here; whoever else imports them gets them.
"""

from __future__ import annotations

import sys

_OPTIONAL_TO_KERAS = ("sklearn", "matplotlib")


class _HiddenFromKeras:
    """A finder that comes before the others and finds nothing."""

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        """Raise ModuleNotFoundError if it is Keras that looks for one of these packages."""
        if name in _OPTIONAL_TO_KERAS and _importing_module().startswith("keras."):
            raise ModuleNotFoundError(f"{name} is hidden from Keras in tests", name=name)


def _importing_module() -> str:
    frame = sys._getframe(2)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("importlib."):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))


sys.meta_path.insert(0, _HiddenFromKeras)
