"""Builds request messages from callers' arguments. Performs no I/O."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeGuard, TypeVar

import numpy as np

from understudy.clients.client_errors import InvalidArgumentError
from understudy.clients.evaluation_types import EvaluationOutcome, ExampleKind, Metric
from understudy.clients.types import ModelMetadata, Tensors, TensorSpec, Version
from understudy.v1 import evaluation_pb2, fleet_pb2, model_pb2, prediction_pb2, tensor_pb2
from understudy.wire import WireError, encode_all, fixed_size_dtype

Value = TypeVar("Value")

_STRING: Final = "string"
_TARGETS: Final = "targets"
_SAMPLE_WEIGHTS: Final = "sample_weights"
_BATCH_PARTS: Final = 4
_LABELS: Final = {
    "serving": tensor_pb2.VERSION_LABEL_SERVING,
    "latest": tensor_pb2.VERSION_LABEL_LATEST,
    "best": tensor_pb2.VERSION_LABEL_BEST,
}
_EXAMPLE_KINDS: Final = {
    "hardest": evaluation_pb2.EXAMPLE_KIND_HARDEST,
    "newly_wrong": evaluation_pb2.EXAMPLE_KIND_NEWLY_WRONG,
    "newly_right": evaluation_pb2.EXAMPLE_KIND_NEWLY_RIGHT,
}
_OUTCOMES: Final = {
    "scored": evaluation_pb2.EVALUATION_OUTCOME_SCORED,
    "skipped": evaluation_pb2.EVALUATION_OUTCOME_SKIPPED,
    "failed": evaluation_pb2.EVALUATION_OUTCOME_FAILED,
    "accepted": evaluation_pb2.EVALUATION_OUTCOME_ACCEPTED,
    "refused": evaluation_pb2.EVALUATION_OUTCOME_REFUSED,
    "undecided": evaluation_pb2.EVALUATION_OUTCOME_UNDECIDED,
    "rollout_started": evaluation_pb2.EVALUATION_OUTCOME_ROLLOUT_STARTED,
    "rollout_promoted": evaluation_pb2.EVALUATION_OUTCOME_ROLLOUT_PROMOTED,
    "rollout_rolled_back": evaluation_pb2.EVALUATION_OUTCOME_ROLLOUT_ROLLED_BACK,
    "rollout_stopped": evaluation_pb2.EVALUATION_OUTCOME_ROLLOUT_STOPPED,
}


@dataclass(frozen=True, kw_only=True)
class Names:
    """The names of the model's inputs and outputs, in the model's order, and the dtypes of inputs of numbers."""

    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    dtypes: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> Names:
        """Return those of a model with these inputs and outputs."""
        return cls(
            inputs=tuple(spec.name for spec in inputs),
            outputs=tuple(spec.name for spec in outputs),
            dtypes={spec.name: spec.dtype for spec in inputs if spec.dtype != _STRING},
        )


class KnownNames:
    """The names for arrays without names, and the dtypes for lists of numbers, requested once.

    They are the names of the serving version, or of the requested one if none is serving. Other versions have the same
    ones unless the architecture changed; in that case, pass arrays by name.
    """

    def __init__(self) -> None:
        self.names: Names | None = None

    def learn(self, metadata: ModelMetadata) -> Names:
        """Remember and return the names."""
        self.names = Names.of(metadata.inputs, metadata.outputs)
        return self.names

    def forget(self) -> None:
        """Request the names again next time, since the server refused a request."""
        self.names = None


@dataclass(frozen=True, kw_only=True)
class Requests:
    """Builds the requests to one model.

    Attributes:
        model_name: The model's name on the server; empty for the server's only one.
    """

    model_name: str

    def predict(self, inputs: Tensors, version: Version | None, names: Names) -> prediction_pb2.PredictRequest:
        """Return a Predict request; arrays without names get the inputs' names, and lists of numbers their dtypes."""
        return prediction_pb2.PredictRequest(
            model_name=self.model_name, version=selector(version), inputs=_input_tensors(inputs, names)
        )

    def evaluate_options(
        self,
        version: Version | None,
        metrics: Sequence[str | Metric],
        *,
        slices: Sequence[str] = (),
        slice_min_examples: int = 1,
        resamples: int = 0,
        confidence: float = 0.95,
    ) -> evaluation_pb2.EvaluateRequest:
        """Return the message that opens an Evaluate stream."""
        options = evaluation_pb2.EvaluateOptions(
            model_name=self.model_name,
            version=selector(version),
            metrics=_metric_specs(metrics),
            slices=_several("slices", slices),
            slice_min_examples=slice_min_examples,
            resamples=resamples,
            confidence=confidence,
        )
        return evaluation_pb2.EvaluateRequest(options=options)

    def compare_options(
        self,
        versions: Sequence[Version],
        metrics: Sequence[str | Metric],
        *,
        dataset: str | None,
        resamples: int,
        confidence: float,
        seed: int,
        slices: Sequence[str] = (),
        slice_min_examples: int = 1,
    ) -> evaluation_pb2.CompareRequest:
        """Return the message that opens a Compare stream."""
        if not versions:
            raise InvalidArgumentError("versions is empty; 2 to 16 can be compared with one another")
        options = evaluation_pb2.CompareOptions(
            model_name=self.model_name,
            versions=[selector(version) or tensor_pb2.VersionSelector() for version in _several("versions", versions)],
            metrics=_metric_specs(metrics),
            dataset=dataset or "",
            resamples=resamples,
            confidence=confidence,
            seed=seed,
            slices=_several("slices", slices),
            slice_min_examples=slice_min_examples,
        )
        return evaluation_pb2.CompareRequest(options=options)

    def replay_options(self, version: Version | None) -> evaluation_pb2.ReplayRequest:
        """Return the message that opens a Replay stream."""
        options = evaluation_pb2.ReplayOptions(model_name=self.model_name, version=selector(version))
        return evaluation_pb2.ReplayRequest(options=options)

    def evaluate_dataset(
        self, dataset: str, version: Version | None, *, rescore: bool
    ) -> evaluation_pb2.EvaluateDatasetRequest:
        """Return an EvaluateDataset request."""
        return evaluation_pb2.EvaluateDatasetRequest(
            model_name=self.model_name, version=selector(version), dataset=dataset, rescore=rescore
        )

    def list_evaluations(
        self,
        *,
        page_token: str,
        dataset: str | None,
        min_step: int | None,
        max_step: int | None,
        outcome: EvaluationOutcome | None,
    ) -> evaluation_pb2.ListEvaluationsRequest:
        """Return the request for one page of the ledger."""
        if outcome is not None and outcome not in _OUTCOMES:
            raise InvalidArgumentError(f"outcome is {outcome!r}; expected one of {', '.join(_OUTCOMES)}")
        return evaluation_pb2.ListEvaluationsRequest(
            model_name=self.model_name,
            page_token=page_token,
            dataset=dataset or "",
            min_step=min_step,
            max_step=max_step,
            outcome=None if outcome is None else _OUTCOMES[outcome],
        )

    def watch_evaluations(self, after: int | evaluation_pb2.EvaluationRecord) -> evaluation_pb2.WatchEvaluationsRequest:
        """Return a WatchEvaluations request that goes on after a sequence number, or after the entry that was seen."""
        if isinstance(after, int):
            return evaluation_pb2.WatchEvaluationsRequest(model_name=self.model_name, after_sequence=after)
        return evaluation_pb2.WatchEvaluationsRequest(
            model_name=self.model_name, after_sequence=after.sequence, after_recorded_at=after.recorded_at
        )

    def tables(self, dataset: str | None, version: Version | None) -> evaluation_pb2.GetEvaluationTablesRequest:
        """Return a GetEvaluationTables request."""
        return evaluation_pb2.GetEvaluationTablesRequest(
            model_name=self.model_name, version=selector(version), dataset=dataset or ""
        )

    def examples(
        self,
        kind: ExampleKind,
        dataset: str | None,
        *,
        version: Version | None,
        baseline: Version | None,
        max_examples: int,
    ) -> evaluation_pb2.GetExamplesRequest:
        """Return a GetExamples request."""
        if kind not in _EXAMPLE_KINDS:
            raise InvalidArgumentError(f"kind is {kind!r}; expected one of {', '.join(_EXAMPLE_KINDS)}")
        return evaluation_pb2.GetExamplesRequest(
            model_name=self.model_name,
            version=selector(version),
            dataset=dataset or "",
            kind=_EXAMPLE_KINDS[kind],
            baseline=selector(baseline),
            max_examples=max_examples,
        )

    def metadata(self, version: Version | None) -> model_pb2.GetModelMetadataRequest:
        """Return a GetModelMetadata request."""
        return model_pb2.GetModelMetadataRequest(model_name=self.model_name, version=selector(version))

    def fleet(self) -> fleet_pb2.GetFleetRequest:
        """Return a GetFleet request."""
        return fleet_pb2.GetFleetRequest(model_name=self.model_name)

    def status(self) -> model_pb2.GetModelStatusRequest:
        """Return a GetModelStatus request."""
        return model_pb2.GetModelStatusRequest(model_name=self.model_name)

    def checkpoints(self) -> model_pb2.ListCheckpointsRequest:
        """Return a ListCheckpoints request."""
        return model_pb2.ListCheckpointsRequest(model_name=self.model_name)

    def pin(self, version: Version) -> model_pb2.PromoteRequest:
        """Return the Promote request that pins a version."""
        return model_pb2.PromoteRequest(
            model_name=self.model_name, action=model_pb2.PROMOTE_ACTION_PIN, version=selector(version)
        )

    def unpin(self) -> model_pb2.PromoteRequest:
        """Return the Promote request that removes the pin."""
        return model_pb2.PromoteRequest(model_name=self.model_name, action=model_pb2.PROMOTE_ACTION_UNPIN)

    def roll_back(self) -> model_pb2.PromoteRequest:
        """Return the Promote request that serves the previous version."""
        return model_pb2.PromoteRequest(model_name=self.model_name, action=model_pb2.PROMOTE_ACTION_ROLL_BACK)


def is_described(inputs: Tensors) -> bool:
    """Return whether all inputs have names and dtypes of their own, so that the model's are not needed."""
    return isinstance(inputs, Mapping) and not any(_has_no_dtype(value) for _, value in _flattened(inputs))


def is_described_batch(batch: Any) -> bool:
    """Return the same of a batch to score, whose targets keep their dtypes."""
    inputs, targets, *_ = batch_parts(batch)
    return is_described(inputs) and not isinstance(targets, tuple | list)


def evaluate_batch(batch: Any, names: Names) -> evaluation_pb2.EvaluateRequest:
    """Return the message that carries one batch; see `batch_parts`.

    Raises:
        InvalidArgumentError: The batch is something else, or an array cannot be sent.
    """
    return evaluation_pb2.EvaluateRequest(batch=_batch(batch, names))


def compare_batch(batch: Any, names: Names) -> evaluation_pb2.CompareRequest:
    """Return the message of a Compare stream for one batch; see `evaluate_batch`."""
    return evaluation_pb2.CompareRequest(batch=_batch(batch, names))


def replay_batch(inputs: Tensors, names: Names) -> evaluation_pb2.ReplayRequest:
    """Return the message of a Replay stream for one batch of inputs, as for a Predict request."""
    return evaluation_pb2.ReplayRequest(batch=evaluation_pb2.ReplayBatch(inputs=_input_tensors(inputs, names)))


def batch_parts(batch: Any) -> tuple[Any, ...]:
    """Return ``(x, y, sample_weight, features)``, of which all but the first may be None.

    Raises:
        InvalidArgumentError: The batch is not the first one to four of these, or the features have no names.
    """
    if not isinstance(batch, tuple | list) or not 1 <= len(batch) <= _BATCH_PARTS:
        kind = type(batch).__name__
        came = f"{_article(kind)} {kind}" + (f" of {len(batch)}" if isinstance(batch, tuple | list) else "")
        raise InvalidArgumentError(
            f"a batch is (x, y) or (x, y, sample_weight), or (x,) without targets, but got {came}; give an iterable of "
            "such, as in [(x, y)]"
        )
    parts = (*batch, None, None, None)[:_BATCH_PARTS]
    if not (parts[-1] is None or isinstance(parts[-1], Mapping)):
        raise InvalidArgumentError(f"features are arrays by name, but got a {type(parts[-1]).__name__}")
    return parts


def _article(noun: str) -> str:
    return "an" if noun.startswith(("a", "e", "i", "o", "u", "ndarray")) else "a"


def selector(version: Version | None) -> tensor_pb2.VersionSelector | None:
    """Return the selector of a version; None for the serving version.

    Raises:
        InvalidArgumentError: The version is neither a step nor a label.
    """
    if version is None:
        return None
    if isinstance(version, str):
        if version not in _LABELS:
            raise _no_version(version)
        return tensor_pb2.VersionSelector(label=_LABELS[version])
    try:
        return tensor_pb2.VersionSelector(step=version)
    except (TypeError, ValueError):
        raise _no_version(version) from None


def _no_version(version: object) -> InvalidArgumentError:
    return InvalidArgumentError(f"version is {version!r}; expected a step or one of {', '.join(_LABELS)}")


def _several(name: str, values: Sequence[Value]) -> Sequence[Value]:
    if isinstance(values, str):
        raise InvalidArgumentError(f"{name} is the text {values!r}; expected a list, such as [{values!r}]")
    return values


def _metric_specs(metrics: Sequence[str | Metric]) -> list[evaluation_pb2.MetricSpec]:
    return [_metric_spec(metric) for metric in _several("metrics", metrics)]


def _metric_spec(metric: object) -> evaluation_pb2.MetricSpec:
    if isinstance(metric, str):
        return evaluation_pb2.MetricSpec(name=metric)
    if not isinstance(metric, Metric):
        raise InvalidArgumentError(
            f"metrics holds a {type(metric).__name__}; expected names, such as 'AUC', or understudy.clients.Metric"
        )
    try:
        config_json = json.dumps(dict(metric.config)) if metric.config else ""
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"the config of metric {metric.name!r} must be JSON: {error}") from error
    return evaluation_pb2.MetricSpec(name=metric.name, config_json=config_json)


def _batch(batch: Any, names: Names) -> evaluation_pb2.EvaluateBatch:
    inputs, targets, weights, features = batch_parts(batch)
    return evaluation_pb2.EvaluateBatch(
        inputs=_input_tensors(inputs, names),
        targets={} if targets is None else _target_tensors(targets, names),
        sample_weights={} if weights is None else _tensors(_by_name(weights, _SAMPLE_WEIGHTS)),
        features=_tensors(features or {}),
    )


def _input_tensors(value: Tensors, names: Names) -> dict[str, tensor_pb2.Tensor]:
    if isinstance(value, Mapping) or len(names.inputs) == 1:
        return _tensors(_with_dtypes(_by_name(value, *names.inputs), names))
    if _is_in_order(value, names.inputs):
        return _tensors(_with_dtypes(dict(zip(names.inputs, value, strict=True)), names))
    came = f"a {type(value).__name__} of {len(value)}" if isinstance(value, tuple | list) else "a lone array"
    listed = ", ".join(names.inputs)
    raise InvalidArgumentError(
        f"got {came}; this model takes {listed}: give arrays by name, or a list of {len(names.inputs)} in this order"
    )


def _with_dtypes(inputs: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """Make arrays of the model's dtypes of the inputs that are Python's numbers, which have none of their own."""
    return {name: _as_dtype(value, names.dtypes.get(name)) for name, value in inputs.items()}


def _as_dtype(value: Any, dtype: str | None) -> Any:
    if dtype is None or not _has_no_dtype(value):
        return value
    try:
        array = np.asarray(value)
    except ValueError:  # the codec says why
        return value
    if array.dtype not in {np.dtype(np.float64), np.dtype(np.int64)}:
        return value
    expected = fixed_size_dtype(dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype(expected)
    if array.dtype.kind == "i" and expected.kind in "iu":
        fits = np.array_equal(cast, array)
    else:
        fits = np.can_cast(array.dtype, expected, "same_kind") and np.array_equal(np.isfinite(cast), np.isfinite(array))
    return cast if fits else value


def _has_no_dtype(value: Any) -> bool:
    return isinstance(value, tuple | list | int | float)


def _target_tensors(value: Tensors, names: Names) -> dict[str, tensor_pb2.Tensor]:
    if len(names.outputs) > 1 and _is_in_order(value, names.outputs):
        return _tensors(dict(zip(names.outputs, value, strict=True)))
    return _tensors(_by_name(value, _TARGETS))


def _is_in_order(value: Tensors, names: Sequence[str]) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, tuple | list) and len(value) == len(names)


def _by_name(value: Tensors, *lone_name: str) -> Mapping[str, Any]:
    return dict(_flattened(value)) if isinstance(value, Mapping) else dict.fromkeys(lone_name, value)


def _tensors(arrays: Mapping[str, Any]) -> dict[str, tensor_pb2.Tensor]:
    try:
        return encode_all(arrays)
    except WireError as error:
        raise InvalidArgumentError(str(error)) from error


def _flattened(structure: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in structure.items():
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value
