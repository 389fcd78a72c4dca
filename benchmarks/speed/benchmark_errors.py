"""The exceptions of measurements."""

from __future__ import annotations


class BenchmarkError(Exception):
    """The measurement failed, or its result cannot be trusted. The text gives the reason and the remedy."""
