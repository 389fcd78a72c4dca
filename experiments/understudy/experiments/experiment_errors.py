"""The exceptions of experiments."""

from __future__ import annotations


class ExperimentError(Exception):
    """An experiment cannot be found or is invalid.

    The text says what was given, what was expected and what to do. If a user's own code raised, its exception is the
    cause (``__cause__``).
    """


class ExampleError(Exception):
    """Arrays of examples cannot be read, or do not fit a model. The text says where, what was found and expected."""
