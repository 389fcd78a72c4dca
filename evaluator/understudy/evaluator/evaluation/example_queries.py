"""Finds the tables of evaluations, and the examples that are hard or changed between two versions."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from understudy.checkpoints.signature import Signature
from understudy.evaluator.datasets.dataset import EvaluationDataset
from understudy.evaluator.evaluation.example_outcomes import Flips, PredictionReader, flips, outcomes_of
from understudy.evaluator.evaluator_errors import (
    CancelledError,
    InvalidInputError,
    NotEvaluableError,
    VersionNotFoundError,
)
from understudy.evaluator.records.ledger import Ledger
from understudy.evaluator.records.result_files import TableFiles
from understudy.evaluator.types import (
    WHOLE_CHECKPOINT,
    Array,
    Arrays,
    Batch,
    EvaluationOutcome,
    EvaluationRecord,
)
from understudy.experiments.example_arrays import EXAMPLE_KEY

ExampleKind = Literal["hardest", "newly_wrong", "newly_right"]

MAX_LISTED = 1000
"""The most examples that one answer holds."""

MAX_CONTENT_BYTES = 2 * 2**20
"""The most bytes of inputs and targets that one answer holds."""

_SHOWN_STEPS = 20
_DESCRIBED_FLIPS = 20
_OF_EXAMPLES = frozenset({"outcomes", "predicted"})
"""What tables hold about every example, which is large."""


@dataclass(frozen=True, kw_only=True)
class EvaluationTables:
    """The tables of one evaluation.

    Attributes:
        record: The entry of the ledger.
        content: JSON values: ``examples``, ``outputs`` (the tables by output), ``slices``, ``hardest`` and ``notes``.
    """

    record: EvaluationRecord
    content: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ExampleList:
    """Examples of a dataset.

    Attributes:
        record: The evaluation that they belong to.
        baseline: The evaluation that it is compared with; None for the hardest examples.
        total: How many there are; there may be fewer in the list.
        indices: Their places in the dataset.
        described: What is known about each, as JSON values: of the hardest the loss; of each output with classes what
            is ``actual`` and ``predicted``, and of flips what the ``baseline`` predicted.
        batch: Their inputs, targets and sample weights; those of the first examples only if they take much memory, and
            None if the dataset has changed since.
        flips: How the evaluations differ; None for the hardest examples.
        notes: Why something is missing.
    """

    record: EvaluationRecord
    baseline: EvaluationRecord | None
    total: int
    indices: Sequence[int]
    described: Sequence[Mapping[str, Any]]
    batch: Batch | None
    flips: Flips | None
    notes: tuple[str, ...] = field(default=())


class ExampleQueries:
    """Reads what evaluations recorded about examples. Thread-safe; methods block while they read.

    Args:
        ledger: The entries.
        tables: Their tables.
        datasets: The datasets, by name.
        batch_size: The examples per batch when a dataset is read.
        sliced: The names of the features that slices need, with which examples are listed.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        tables: TableFiles,
        datasets: Mapping[str, EvaluationDataset],
        batch_size: int,
        sliced: Collection[str] = (),
    ) -> None:
        self._ledger = ledger
        self._tables = tables
        self._datasets = datasets
        self._batch_size = batch_size
        self._sliced = frozenset(sliced)

    def tables(self, step: int, dataset: str) -> EvaluationTables:
        """Return the tables of the last evaluation of a step on a dataset that has any.

        Raises:
            VersionNotFoundError: There is no such evaluation, or it has no tables.
            LedgerError: The ledger or the tables cannot be read.
        """
        record, content = self._found(step, dataset)
        return EvaluationTables(
            record=record, content={name: value for name, value in content.items() if name not in _OF_EXAMPLES}
        )

    def has_tables(self, record: EvaluationRecord) -> bool:
        """Return whether tables were recorded with an evaluation."""
        return self._tables.path(record.sequence).exists()

    def examples(
        self,
        kind: ExampleKind,
        step: int,
        dataset: str,
        *,
        baseline_step: int | None,
        limit: int,
        signature: Signature,
        is_wanted: Callable[[], bool],
    ) -> ExampleList:
        """Return examples of a dataset.

        Args:
            kind: Which ones: the hardest, or those that only one of two versions decided rightly.
            step: The version.
            dataset: The dataset.
            baseline_step: The version to compare with; not for the hardest.
            limit: How many examples to return at most, from 1 to `MAX_LISTED`.
            signature: The inputs and outputs of the model, to read the dataset with.
            is_wanted: Called between batches; returns whether to continue.

        Raises:
            VersionNotFoundError: There is no such evaluation, or it has no tables.
            NotEvaluableError: The evaluation has nothing of this kind, or the two cannot be compared.
            InvalidInputError: The limit is out of range, or there is no step to compare with.
            CancelledError: The answer is no longer wanted.
            LedgerError: The ledger or the tables cannot be read.
        """
        if not 1 <= limit <= MAX_LISTED:
            raise InvalidInputError(f"{limit} examples were requested; ask for 1 to {MAX_LISTED}")
        record, content = self._found(step, dataset)
        if kind == "hardest":
            chosen, baseline, changed = _hardest(record, content), None, None
        else:
            baseline, changed, predictions = self._flips(record, content, baseline_step)
            indices = changed.newly_wrong if kind == "newly_wrong" else changed.newly_right
            chosen = [{"index": int(index)} for index in indices]
        listed = chosen[:limit]
        if kind != "hardest":
            listed = [predictions.describe(one["index"], is_right=kind == "newly_right") for one in listed]
        batch, notes = self._read(record, [one["index"] for one in listed], signature, is_wanted)
        known = [] if batch is None else [_known(batch, place, self._sliced) for place in range(batch.examples)]
        known += [{} for _ in listed[len(known) :]]
        return ExampleList(
            record=record,
            baseline=baseline,
            total=len(chosen),
            indices=[one["index"] for one in listed],
            described=[
                {**more, **{name: value for name, value in one.items() if name != "index"}}
                for one, more in zip(listed, known, strict=True)
            ],
            batch=batch,
            flips=changed,
            notes=notes,
        )

    def flips(self, step: int, dataset: str, *, baseline_step: int) -> Flips:
        """Return how the evaluations of two steps on a dataset differ.

        Raises:
            VersionNotFoundError: There is no such evaluation, or it has no tables.
            NotEvaluableError: An evaluation has nothing of this kind, or the two cannot be compared.
            LedgerError: The ledger or the tables cannot be read.
        """
        record, content = self._found(step, dataset)
        _, changed, predictions = self._flips(record, content, baseline_step)
        described = [
            predictions.describe(int(index), is_right=is_right)
            for indices, is_right in ((changed.newly_wrong, False), (changed.newly_right, True))
            for index in indices[:_DESCRIBED_FLIPS]
        ]
        return replace(changed, described=[one for one in described if len(one) > 1])

    def _found(self, step: int, dataset: str) -> tuple[EvaluationRecord, Mapping[str, Any]]:
        entries = self._ledger.of_step(step)
        scored = [one for one in entries if one.outcome is EvaluationOutcome.SCORED]
        for record in reversed(scored):
            if record.dataset == dataset and (content := self._tables.read(record.sequence)) is not None:
                return record, content
        if any(record.dataset == dataset for record in scored):
            raise VersionNotFoundError(
                f"step {step} was scored on {dataset!r} without tables; with `understudy serve --tables` they are "
                "recorded with every evaluation, and `understudy rescore` scores earlier steps again. "
                f"{self._available(dataset)}"
            )
        failed = [
            one
            for one in entries
            if one.outcome is EvaluationOutcome.FAILED and one.dataset in (dataset, WHOLE_CHECKPOINT)
        ]
        why = f", because its evaluation failed: {failed[-1].reason}" if failed else ""
        raise VersionNotFoundError(f"step {step} has no score on {dataset!r}{why}. {self._available(dataset)}")

    def _available(self, dataset: str) -> str:
        steps = sorted(
            {record.step for record in self._ledger.scored(dataset) if self._tables.path(record.sequence).exists()}
        )
        if not steps:
            return f"No evaluation on {dataset!r} has tables"
        more = f" and {len(steps) - _SHOWN_STEPS} earlier ones" if len(steps) > _SHOWN_STEPS else ""
        return f"There are tables of the steps {', '.join(map(str, steps[-_SHOWN_STEPS:]))}{more}"

    def _flips(
        self, record: EvaluationRecord, content: Mapping[str, Any], baseline_step: int | None
    ) -> tuple[EvaluationRecord, Flips, _Predictions]:
        if baseline_step is None:
            raise InvalidInputError("there is no version to compare with; name a baseline")
        if baseline_step == record.step:
            raise InvalidInputError(f"step {record.step} would be compared with itself; name another baseline")
        baseline, other = self._found(baseline_step, record.dataset)
        if record.dataset_digest != baseline.dataset_digest:
            raise NotEvaluableError(
                f"the content of {record.dataset!r} changed between the evaluations of step {baseline.step} and step "
                f"{record.step}, so their examples cannot be compared"
            )
        return baseline, flips(_right(record, content), _right(baseline, other)), _Predictions(content, other)

    def _read(
        self, record: EvaluationRecord, indices: Sequence[int], signature: Signature, is_wanted: Callable[[], bool]
    ) -> tuple[Batch | None, tuple[str, ...]]:
        """Read examples from their dataset; return why some or all are missing."""
        dataset = self._datasets.get(record.dataset)
        if dataset is None or dataset.digest != record.dataset_digest:
            change = "is no longer one of the server's" if dataset is None else "has changed since"
            return None, (f"the dataset {record.dataset!r} {change}, so the content of the examples is not known",)
        if not indices:
            return None, ()
        found = dict(_examples_at(indices, dataset.batches(signature, self._batch_size), is_wanted))
        missing = [index for index in indices if index not in found]
        if missing:
            raise NotEvaluableError(
                f"the dataset {record.dataset!r} has no example {missing[0]}: it has become shorter since step "
                f"{record.step} was scored"
            )
        fitting = _fitting([found[index] for index in indices])
        if len(fitting) == len(indices):
            return _joined(fitting), ()
        if not fitting:
            return None, (f"a single example takes more than {MAX_CONTENT_BYTES} bytes, so none has its content here",)
        bound = f"all {len(indices)} take more than {MAX_CONTENT_BYTES} bytes"
        return _joined(fitting), (f"the content of the first {len(fitting)} examples is here; {bound}",)


class _Predictions:
    """What a version and its baseline predicted.

    Args:
        content: The tables of the version; older ones do not say what was predicted.
        baseline: Those of the baseline.
    """

    def __init__(self, content: Mapping[str, Any], baseline: Mapping[str, Any]) -> None:
        self._readers = [
            {name: PredictionReader(found) for name, found in one.get("predicted", {}).items() if found is not None}
            for one in (content, baseline)
        ]

    def describe(self, index: int, *, is_right: bool) -> dict[str, Any]:
        """Return the index of an example that only one of the two decided rightly, and what both predicted.

        Args:
            index: Its place in the dataset.
            is_right: Whether the version was right.
        """
        own, base = self._readers
        outputs = {}
        for name in own.keys() & base.keys():
            predicted, held = own[name].of(index), base[name].of(index)
            outputs[name] = {"actual": predicted if is_right else held, "predicted": predicted, "baseline": held}
        return {"index": index, **({"outputs": dict(sorted(outputs.items()))} if outputs else {})}


def _hardest(record: EvaluationRecord, content: Mapping[str, Any]) -> list[Any]:
    hardest = list(content["hardest"])
    if not hardest:
        raise NotEvaluableError(
            f"no hardest examples of step {record.step} on {record.dataset!r} were recorded: "
            f"{'; '.join(content['notes']) or 'the examples have no losses of their own'}"
        )
    return hardest


def _right(record: EvaluationRecord, content: Mapping[str, Any]) -> Array:
    if content["outcomes"] is None:
        raise NotEvaluableError(
            f"which examples step {record.step} decided rightly on {record.dataset!r} is not recorded: "
            f"{'; '.join(content['notes']) or 'there are too many examples'}"
        )
    return outcomes_of(content["outcomes"])


def _examples_at(
    indices: Sequence[int], batches: Iterator[Batch], is_wanted: Callable[[], bool]
) -> Iterator[tuple[int, Batch]]:
    """Yield the examples at these places, each as a batch of one, and read no further than the last."""
    wanted = np.unique(np.asarray(indices))
    first = 0
    for batch in batches:
        if not is_wanted():
            raise CancelledError("the examples are no longer wanted")
        after = first + batch.examples
        for index in wanted[np.searchsorted(wanted, first) : np.searchsorted(wanted, after)]:
            yield int(index), _slice(batch, int(index) - first)
        if wanted[-1] < after:
            return
        first = after


def _slice(batch: Batch, place: int) -> Batch:
    def one(arrays: Arrays) -> Arrays:
        return {name: array[place : place + 1].copy() for name, array in arrays.items()}

    return Batch(
        inputs=one(batch.inputs),
        targets=one(batch.targets),
        sample_weights=one(batch.sample_weights),
        features=one(batch.features),
    )


def _known(batch: Batch, place: int, sliced: Collection[str]) -> dict[str, Any]:
    """Return the key of an example, if the dataset has keys, and its features and sliced inputs of a single value."""
    columns = {**{name: batch.inputs[name] for name in batch.inputs.keys() & sliced}, **batch.features}
    single = {name: array.reshape(-1) for name, array in columns.items() if array.size == len(array)}
    features = {name: _plain(values[place]) for name, values in single.items()}
    key = features.pop(EXAMPLE_KEY, None)
    return {**({} if key is None else {"key": key}), **({"features": features} if features else {})}


def _plain(value: Any) -> Any:
    """Return a value as a JSON value; numbers that are not finite as text."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    plain = value.item() if hasattr(value, "item") else value
    return plain if not isinstance(plain, float) or math.isfinite(plain) else str(plain)


def _fitting(examples: Sequence[Batch]) -> list[Batch]:
    """Return the first examples, as many as fit into an answer."""
    sizes = np.cumsum([_size(example) for example in examples])
    return list(examples[: int(np.searchsorted(sizes, MAX_CONTENT_BYTES, side="right"))])


def _size(example: Batch) -> int:
    arrays = [*example.inputs.values(), *example.targets.values(), *example.sample_weights.values()]
    return sum(sum(map(len, array.ravel())) if array.dtype.kind == "O" else int(array.nbytes) for array in arrays)


def _joined(examples: Sequence[Batch]) -> Batch:
    def join(parts: Sequence[Arrays]) -> Arrays:
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    return Batch(
        inputs=join([example.inputs for example in examples]),
        targets=join([example.targets for example in examples]),
        sample_weights=join([example.sample_weights for example in examples]),
        features=join([example.features for example in examples]),
    )
