"""What the errors of Keras and TensorFlow say, without what is written around it."""

from __future__ import annotations

import re

_GRAPH_ERROR = "Graph execution error:"
_NODE = "[[{{node"
_AROUND = re.compile(r"^\{\{function_node [^}]*\}\}\s*|^\(\d+\) [A-Z_]+: |\s*\[Op:\w+\]( name:.*)?$")
"""What TensorFlow writes before and after an error of an operation."""

_LAYER_ERROR = re.compile(
    r"Exception encountered when calling ([^\n]+)\.\s+(?:\x1b\[1m)?([^\n\x1b]+?)(?:\.\s|\.?(?:\x1b|\n|$))"
)
"""What Keras writes around an error of a layer: the layer, and the first sentence of the error."""

_DESERIALIZING_ERROR = re.compile(
    r".*^Exception encountered: ([^\n]+?)(?: Full object config: |\n|\Z)", re.DOTALL | re.MULTILINE
)
"""What Keras writes before the cause, for each object around it, and after it."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type if there is no text.

    For an error in a graph, whose text begins with a traceback, it is the line with the actual error; for one of a
    layer, its name and the first sentence; for one about a configuration, the innermost cause.
    """
    if (found := _LAYER_ERROR.search(str(error))) is not None:
        return f"{found[1]}: {found[2]}"
    if (found := _DESERIALIZING_ERROR.match(str(error))) is not None:
        return found[1]
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if lines and lines[0] == _GRAPH_ERROR:
        said = next((index for index, line in enumerate(lines) if _NODE in line), 0)
        before = [line for line in lines[:said] if line]
        lines = [lines[said].partition(_NODE)[0].strip() or before[-1]]
    return _AROUND.sub("", (lines or [""])[0]) or type(error).__name__
