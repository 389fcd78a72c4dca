"""The wording of errors that libraries raise."""

from __future__ import annotations


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, or its type where there is no text."""
    return str(error).strip().split("\n", maxsplit=1)[0] or type(error).__name__
