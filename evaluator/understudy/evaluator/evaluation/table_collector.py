"""Collects the tables of one evaluation from its scored batches."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from understudy.checkpoints.signature import TensorSpec
from understudy.evaluator.evaluation.class_decisions import Decisions
from understudy.evaluator.evaluation.evaluation_stream import ExampleScores
from understudy.evaluator.evaluation.example_outcomes import HardestExamples, Outcomes, PredictedClasses
from understudy.evaluator.evaluation.tables import OutputScoring
from understudy.evaluator.model.inputs import ALL_TARGETS, ALL_WEIGHTS
from understudy.evaluator.types import Array, Arrays, Batch, OutputTask

FORMAT_VERSION = 1

MAX_SLICES = 64
"""Tables are kept for at most so many slices."""

MAX_SLICE_CHARACTERS = 2 * 2**20
"""The tables of slices have curves if all take at most so many characters of JSON."""

_SHOWN_VALUES = 8
_TEXT = "OSU"
_NO_OUTPUTS = "there are no tables, because each batch is scored whole by the model, whose outputs are not kept"
_NO_OUTCOMES = "no output has classes, so no example is right or wrong"


class TableCollector:
    """Collects confusions, curves, residuals, the hardest examples and the outcomes of examples. For one thread.

    Its memory depends on the outputs and the slices, and grows by a few bytes for each example, up to a limit. Counts
    do not depend on the sizes of the batches. Items count by their sample weights, and not at all if the output's mask
    hides them; which examples are right does not depend on weights. The hardest have the greatest losses, with weights.

    Args:
        tasks: The task of each output, by name.
        outputs: The outputs, in order.
    """

    def __init__(self, tasks: Mapping[str, OutputTask], outputs: Sequence[TensorSpec]) -> None:
        self._names = [spec.name for spec in outputs]
        self._scorings = {name: OutputScoring(task) for name, task in tasks.items()}
        self._hardest = HardestExamples()
        self._outcomes = Outcomes()
        self._predicted: dict[str, PredictedClasses] = {}
        self._examples = 0
        self._slices: dict[str, int] = {}
        self._notes: dict[str, None] = {}

    def note(self, text: str) -> None:
        """Add a note to the tables: why something is missing."""
        if text:
            self._notes[text] = None

    def add(self, batch: Batch, scores: ExampleScores, slices: Mapping[str, Array] | None = None) -> None:
        """Count a batch.

        Args:
            batch: The examples; batches come in the order of the dataset.
            scores: Their losses and outputs.
            slices: Which examples belong to each slice, bool ``[examples]`` by its name.
        """
        members = self._counted(slices or {})
        if not scores.outputs:
            self.note(_NO_OUTPUTS)
        decisions = {}
        targets = self._targets(batch)
        for name, output in scores.outputs.items():
            if name in targets and output.ndim:
                decisions[name] = self._scorings[name].add(
                    _items(output),
                    targets[name],
                    members,
                    weights=batch.sample_weights.get(name, batch.sample_weights.get(ALL_WEIGHTS)),
                    mask=scores.masks.get(name),
                )
                if without := self._scorings[name].without:
                    self.note(f"there are no tables of {name!r}: {without}")
        for name, decided in decisions.items():
            if decided is not None:
                self._predicted.setdefault(name, PredictedClasses()).add(decided, batch.examples)
        rights = [decided.right for decided in decisions.values() if decided is not None]
        if rights:
            self._outcomes.add(np.logical_and.reduce(rights))
        if scores.losses is not None:

            def describe(index: int) -> dict[str, Any]:
                return {"outputs": _described(index, scores.outputs, targets, decisions)}

            self._hardest.add(self._examples, scores.losses, describe)
        self._examples += batch.examples

    def document(self) -> dict[str, Any]:
        """Return everything as JSON values; `EvaluationTables` describes them."""
        scored = {name: scoring.document() for name, scoring in self._scorings.items() if scoring.has_items}
        outcomes = self._outcomes.document()
        if outcomes is None and scored:
            self.note(_NO_OUTCOMES)
        slices: list[dict[str, Any]] = [
            {"name": name, "examples": examples, "outputs": self._slice_documents(name)}
            for name, examples in self._slices.items()
        ]
        if len(json.dumps(slices)) > MAX_SLICE_CHARACTERS:
            self.note(f"the tables of all {len(slices)} slices are too large, so their curves are left out")
            for tables in (one for each in slices for one in each["outputs"].values() if "labels" in one):
                tables["labels"] = []
        return {
            "format_version": FORMAT_VERSION,
            "examples": self._examples,
            "outputs": scored,
            "slices": slices,
            "hardest": self._hardest.document(),
            "outcomes": outcomes,
            "predicted": {name: found.document() for name, found in self._predicted.items()},
            "notes": list(self._notes),
        }

    def _slice_documents(self, name: str) -> dict[str, Any]:
        documents = {output: scoring.slice_document(name) for output, scoring in self._scorings.items()}
        return {output: document for output, document in documents.items() if document is not None}

    def _counted(self, slices: Mapping[str, Array]) -> dict[str, Array]:
        """Count the examples of the slices, and return those that tables are kept for."""
        present = {name: members for name, members in slices.items() if members.any()}
        new = {name: int(members.argmax()) for name, members in present.items() if name not in self._slices}
        for name in sorted(new, key=lambda one: (new[one], one)):  # by first example, whatever the batches are
            if len(self._slices) == MAX_SLICES:
                self.note(f"tables are kept for {MAX_SLICES} slices, those whose first examples come first")
                break
            self._slices[name] = 0
        kept = {name: members for name, members in present.items() if name in self._slices}
        for name, members in kept.items():
            self._slices[name] += int(members.sum())
        return kept

    def _targets(self, batch: Batch) -> dict[str, Array]:
        return {self._names[0] if name == ALL_TARGETS else name: array for name, array in batch.targets.items()}


def _items(output: Array) -> Array:
    """Return an output with an axis for its elements."""
    return output[:, np.newaxis] if output.ndim == 1 else output


def _described(
    index: int, outputs: Arrays, targets: Arrays, decisions: Mapping[str, Decisions | None]
) -> dict[str, Any]:
    """Return what an output says about an example of a batch, and what is true."""
    described = {}
    for name, decided in decisions.items():
        if decided is None:
            described[name] = {
                "actual": _shown(targets[name][index]),
                "predicted": _shown(outputs[name][index]),
            }
            continue
        items = np.flatnonzero(decided.examples == index)[:_SHOWN_VALUES]
        described[name] = {
            "actual": [_classes(decided.actual[item]) for item in items],
            "predicted": [_classes(decided.predicted[item]) for item in items],
        }
    return described


def _classes(value: Array) -> Any:
    """Return a class, or the labels that hold."""
    return np.flatnonzero(value)[:_SHOWN_VALUES].tolist() if np.ndim(value) else int(value)


def _shown(values: Any) -> list[float]:
    """Return the first values of an example; none of text."""
    flat = np.ravel(values)
    return [] if flat.dtype.kind in _TEXT else [float(value) for value in flat[:_SHOWN_VALUES]]
