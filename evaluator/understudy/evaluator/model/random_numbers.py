"""Detects from its graph whether a function draws random numbers."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

_RANDOM_OPERATION = re.compile(
    r"(Stateless|Stateful)?(Parameterized)?(Random|TruncatedNormal|StandardNormal|Uniform|Multinomial)"
)


def draws_random_numbers(function: Any) -> bool:
    """Whether a random number reaches an output. Inactive dropout may leave unused operations."""
    graph = function.graph.as_graph_def()
    bodies = {inner.signature.name: inner.node_def for inner in graph.library.function}
    used = _nodes_behind([tensor.op.name for tensor in function.outputs], graph.node)
    called = {name for node in used for name in _functions_of(node)}
    while more := {name for body in called for node in bodies[body] for name in _functions_of(node)} - called:
        called |= more
    nodes = itertools.chain(used, *(bodies[name] for name in called))
    return any(_RANDOM_OPERATION.match(node.op) for node in nodes)


def _nodes_behind(outputs: Sequence[str], nodes: Sequence[Any]) -> list[Any]:
    """Return the nodes that outputs depend on."""
    by_name = {node.name: node for node in nodes}
    found: dict[str, Any] = {}
    waiting = list(outputs)
    while waiting:
        name = waiting.pop().removeprefix("^").partition(":")[0]
        if name not in found:
            found[name] = by_name[name]
            waiting.extend(by_name[name].input)
    return list(found.values())


def _functions_of(node: Any) -> list[str]:
    """Return the names of the functions that a node calls."""
    attributes = node.attr.values()
    return [call.name for value in attributes for call in (value.func, *value.list.func) if call.name]
