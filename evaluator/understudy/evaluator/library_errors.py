"""Shortens the texts of library errors."""

from __future__ import annotations

_GRAPH_ERROR = "Graph execution error:"
_NODE = "[[{{node"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type if there is no text.

    For an error in a graph, whose text begins with a traceback, it is the line with the actual error.
    """
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if lines and lines[0] == _GRAPH_ERROR:
        said = next((index for index, line in enumerate(lines) if _NODE in line), 0)
        lines = [lines[said].partition(_NODE)[0].strip() or lines[said - 1]]
    return (lines or [""])[0] or type(error).__name__
