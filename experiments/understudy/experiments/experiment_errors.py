"""The exceptions of experiments."""

from __future__ import annotations


class ExperimentError(Exception):
    """An experiment cannot be found or does not do what it should.

    The text says what was given, what was expected and what to do. Where a user's own code raised, its exception is the
    cause (``__cause__``).
    """
