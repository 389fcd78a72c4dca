"""Inspects SavedModels: which operations loading or calling one executes, and which files those can reach.

Nothing is judged here but where a file's name comes from; the evaluator knows which operations are harmless.

Loading and calling executes every function of the library, and the nodes of the main graph that a signature or an
initializer needs. The saver's nodes are the exception: restoring only has TensorFlow read the variables beside the
graph, and saving is never called.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from understudy.checkpoints.inspection.bundle import inspect_bundle
from understudy.compat import parse_saved_model, unpack_asset

GRAPH_FILE = "saved_model.pb"
_VARIABLES = Path("variables") / "variables"
_INITIALIZERS = ("saved_model_main_op", "legacy_init_op", "saved_model_init_op")
_TABLES_FROM_FILES = {"InitializeTableFromTextFile": 1, "InitializeTableFromTextFileV2": 1}
"""The operations that may read a file if it is an asset, with the place of its name among their inputs."""

_PASSING_ON = frozenset({"Identity", "ReadVariableOp"})
_ASSET_COLLECTION = "saved_model_assets"
_PRINTS_TO = ("", "stderr", "stdout", "log(info)", "log(warning)", "log(error)")
_MAX_TRACED = 100_000


def inspect_saved_model(folder: Path) -> dict[str, Any]:
    """Return ``operations`` and ``restoring``, each the place of an operation by its name, and ``problems``.

    Raises:
        ValueError: The graph or the index of the variables is damaged, or exceeds a bound.
        google.protobuf.message.DecodeError: The graph is damaged.
    """
    inspect_bundle(folder / _VARIABLES)
    graphs = parse_saved_model((folder / GRAPH_FILE).read_bytes()).meta_graphs
    if not graphs:
        raise ValueError(f"{GRAPH_FILE} holds no graph")
    found = _Findings()
    for graph in graphs:
        _MetaGraph(graph).inspect(found)
    return {"operations": found.operations, "restoring": found.restoring, "problems": found.problems}


@dataclass
class _Findings:
    operations: dict[str, str] = field(default_factory=dict)
    restoring: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Body:
    """The nodes of a function, or of the main graph, whose name is empty."""

    name: str
    nodes: Mapping[str, Any]
    arguments: tuple[str, ...] = ()

    def place(self, node: Any) -> str:
        return f"node {node.name!r} of {f'function {self.name!r}' if self.name else 'the graph'}"


class _MetaGraph:
    def __init__(self, graph: Any) -> None:
        self._graph = graph
        library = graph.graph_def.library
        self._main = _Body("", {node.name: node for node in graph.graph_def.node})
        self._functions = {
            function.signature.name: _Body(
                function.signature.name,
                {node.name: node for node in function.node_def},
                tuple(argument.name for argument in function.signature.input_arg),
            )
            for function in library.function
        }
        self._gradients = {gradient.function_name: gradient.gradient_func for gradient in library.gradient}
        self._concrete = graph.object_graph_def.concrete_functions
        self._calls: dict[str, list[tuple[_Body, Any]]] = defaultdict(list)
        for body in (self._main, *self._functions.values()):
            for node in body.nodes.values():
                for name in _called(node):
                    self._calls[name].append((body, node))
        self._assigned: dict[str, list[tuple[_Body, str]]] = defaultdict(list)
        for node in self._main.nodes.values():
            if node.op == "AssignVariableOp" and len(node.input) > 1:
                self._assigned[_node_name(node.input[0])].append((self._main, node.input[1]))
        self._asset_files = [*graph.asset_file_def, *_legacy_assets(graph)]
        self._assets = {_node_name(asset.tensor_info.name) for asset in self._asset_files}

    def inspect(self, found: _Findings) -> None:
        for asset in self._asset_files:
            name = PurePosixPath(asset.filename)
            if name.is_absolute() or ".." in name.parts or "://" in asset.filename:
                found.problems.append(f"its asset {asset.filename!r} leads out of it")
        saver = self._graph.saver_def
        executed = self._nodes_for([*self._fetches()])
        restoring = [node for node in self._nodes_for([saver.restore_op_name]) if node not in executed]
        saving = self._nodes_for([saver.save_tensor_name])
        restore_functions = self._reached_from(restoring)
        executed_functions = self._reached_from(executed) | self._reached(self._concrete)
        rest = self._functions.keys() - executed_functions - restore_functions - self._reached_from(saving)
        executed_functions |= self._reached(rest)
        self._list(self._main, executed, found, found.operations)
        self._list(self._main, restoring, found, found.restoring)
        for name, body in self._functions.items():
            if name in executed_functions:
                self._list(body, body.nodes, found, found.operations)
            elif name in restore_functions:
                self._list(body, body.nodes, found, found.restoring)

    def _list(self, body: _Body, names: Iterable[str], found: _Findings, operations: dict[str, str]) -> None:
        for name in names:
            node = body.nodes[name]
            if node.op in _TABLES_FROM_FILES:
                self._check_table(body, node, found)
            else:
                operations.setdefault(node.op, body.place(node))
            if node.op == "PrintV2" and node.attr["output_stream"].s.decode(errors="replace") not in _PRINTS_TO:
                found.problems.append(f"{body.place(node)} prints to a file")

    def _check_table(self, body: _Body, node: Any, found: _Findings) -> None:
        inputs = [name for name in node.input if not name.startswith("^")]
        place = _TABLES_FROM_FILES[node.op]
        if place >= len(inputs) or not self._is_asset(body, inputs[place]):
            found.problems.append(f"{body.place(node)} reads a file that is not an asset of the model ({node.op})")

    def _is_asset(self, body: _Body, tensor: str) -> bool:
        """Return whether every value that a tensor can have is the path of an asset."""
        waiting, seen = [(body, tensor)], set()
        while waiting:
            body, tensor = waiting.pop()
            name = tensor.partition(":")[0]
            if (body.name, name) in seen:
                continue
            seen.add((body.name, name))
            if len(seen) > _MAX_TRACED:
                return False
            if not body.name and name in self._assets:
                continue
            sources = self._sources(body, name)
            if sources is None:
                return False
            waiting.extend(sources)
        return True

    def _sources(self, body: _Body, name: str) -> list[tuple[_Body, str]] | None:
        """Return where a tensor's value comes from: nowhere else for a captured asset; None if it is unknown."""
        if name in body.arguments:
            return self._sources_of_argument(body, body.arguments.index(name))
        node = body.nodes.get(name)
        if node is not None and node.op in _PASSING_ON and node.input:
            return [(body, node.input[0])]
        if node is not None and node.op == "VarHandleOp" and body is self._main:
            return self._assigned.get(name)
        return None

    def _sources_of_argument(self, body: _Body, place: int) -> list[tuple[_Body, str]] | None:
        sources: list[tuple[_Body, str]] = []
        concrete = self._concrete.get(body.name)
        if concrete is not None:
            captured = place - (len(body.arguments) - len(concrete.bound_inputs))
            if captured < 0:
                return None
            objects = self._graph.object_graph_def.nodes
            target = concrete.bound_inputs[captured]
            if not 0 <= target < len(objects) or objects[target].WhichOneof("kind") != "asset":
                return None
        elif not self._calls[body.name]:
            return None
        for caller, node in self._calls[body.name]:
            inputs = [tensor for tensor in node.input if not tensor.startswith("^")]
            if node.op not in ("StatefulPartitionedCall", "PartitionedCall") or place >= len(inputs):
                return None
            sources.append((caller, inputs[place]))
        return sources

    def _fetches(self) -> Iterator[str]:
        """Yield the names of what calling a signature or initializing fetches."""
        for signature in self._graph.signature_def.values():
            for output in signature.outputs.values():
                yield output.name
                yield from (getattr(output.coo_sparse, part) for part in _SPARSE)
                yield from (component.name for component in output.composite_tensor.components)
        for name in _INITIALIZERS:
            if name in self._graph.collection_def:
                yield from self._graph.collection_def[name].node_list.value

    def _nodes_for(self, fetches: Iterable[str]) -> dict[str, None]:
        """Return the names of the nodes of the main graph that computing these tensors or operations executes."""
        waiting = [_node_name(name) for name in fetches]
        found: dict[str, None] = {}
        while waiting:
            name = waiting.pop()
            if name in found or name not in self._main.nodes:
                continue
            found[name] = None
            waiting.extend(_node_name(tensor) for tensor in self._main.nodes[name].input)
        return found

    def _reached_from(self, nodes: Iterable[str]) -> set[str]:
        return self._reached(name for node in nodes for name in _called(self._main.nodes[node]))

    def _reached(self, functions: Iterable[str]) -> set[str]:
        """Return the functions of the library that these call, with themselves."""
        waiting, found = list(functions), set()
        while waiting:
            name = waiting.pop()
            if name in found or name not in self._functions:
                continue
            found.add(name)
            if name in self._gradients:
                waiting.append(self._gradients[name])
            waiting.extend(called for node in self._functions[name].nodes.values() for called in _called(node))
        return found


def _legacy_assets(graph: Any) -> Iterator[Any]:
    """Yield the assets of a SavedModel that TensorFlow 1 wrote."""
    if _ASSET_COLLECTION in graph.collection_def:
        assets = map(unpack_asset, graph.collection_def[_ASSET_COLLECTION].any_list.value)
        yield from (asset for asset in assets if asset is not None)


_SPARSE = ("values_tensor_name", "indices_tensor_name", "dense_shape_tensor_name")


def _node_name(tensor: str) -> str:
    return tensor.removeprefix("^").partition(":")[0]


def _called(node: Any) -> Iterator[str]:
    """Yield the functions that a node names: those it calls, and the one that is its operation."""
    yield node.op
    for value in node.attr.values():
        if value.HasField("func"):
            yield value.func.name
        yield from (function.name for function in value.list.func)
