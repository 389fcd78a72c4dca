"""What a measurement can fail with."""

from __future__ import annotations


class BenchmarkError(Exception):
    """It cannot be measured, or what came out cannot be trusted; the text says why and what to do."""
