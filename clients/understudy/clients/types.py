"""The clients' types of arguments, predictions, the model, its versions, and what is served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

Version = int | Literal["serving", "latest", "best"]
"""A version of the model: a training step, or a label that the server resolves when the request arrives."""

Tensors = npt.ArrayLike | Sequence[Any] | Mapping[str, Any]
"""One array, several in the model's order, or arrays by name. Axis 0 is the batch.

Mappings may be nested; their keys are joined with ``/``.
"""

VersionState = Literal["START", "LOADING", "AVAILABLE", "UNLOADING", "END", "UNKNOWN"]
"""The state of a version; UNKNOWN is one that only newer servers have."""


class HoldsArrays:
    """The base of dataclasses that hold arrays: equal if all values, and the dtypes of arrays, are. NaN equals NaN."""

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return _are_equal(_values_of(self), _values_of(other))

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True, eq=False)
class PredictResult(HoldsArrays):
    """The prediction for one batch.

    Attributes:
        outputs: Every output by name, each ``[examples, ...]`` and read-only; strings are ``bytes`` in object arrays.
        step: The step of the checkpoint that computed all examples.
    """

    outputs: Mapping[str, Array]
    step: int

    @property
    def output(self) -> Array:
        """The only output; raise ValueError if there are several."""
        if len(self.outputs) != 1:
            raise ValueError(f"the model has {len(self.outputs)} outputs; take one of {', '.join(self.outputs)}")
        return next(iter(self.outputs.values()))


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One named input or output of the model; None in the shape means any length, axis 0 is the batch.

    ``positional`` says that the name denotes the position in the model's order: Keras generated the tensor's name.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    positional: bool = False


@dataclass(frozen=True, kw_only=True)
class OutputTask:
    """What an output is for, as far as the compiled loss and metrics tell.

    Attributes:
        kind: ``binary`` for one value, of the second of two classes; ``multilabel`` for several labels of which any
            number may hold; ``multiclass`` for the class with the largest value along the last axis.
        threshold: A label of a ``binary`` or ``multilabel`` output holds if its value is greater.
    """

    kind: Literal["unknown", "binary", "multilabel", "multiclass", "regression"]
    threshold: float


@dataclass(frozen=True, kw_only=True)
class ModelMetadata:
    """One version: its inputs and outputs in the model's order, the devices it runs on, and the server's datasets.

    ``output_tasks`` says what each output is for, by its name; a server of an earlier release does not.
    """

    model_name: str
    step: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    replicas: int
    devices: tuple[str, ...]
    datasets: tuple[str, ...]
    notes: tuple[str, ...]
    output_tasks: Mapping[str, OutputTask] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ReplayedModel:
    """The version that answers a replay: its inputs and outputs in the model's order, and the tasks of the outputs."""

    model_name: str
    step: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    output_tasks: Mapping[str, OutputTask]


@dataclass(frozen=True, kw_only=True)
class VersionStatus:
    """The state of one version; ``error`` says why the last attempt to load it failed, or is empty."""

    step: int
    state: VersionState
    error: str
    serving: bool


@dataclass(frozen=True, kw_only=True)
class ModelStatus:
    """The state of every version, newest first, and the step of each label; None for a label without a step yet.

    ``problem`` says why the server finds no new checkpoints now, or cannot read some of them; it is empty if it can.
    """

    model_name: str
    versions: tuple[VersionStatus, ...]
    serving_step: int | None
    latest_step: int | None
    best_step: int | None
    pinned_step: int | None
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint that the server sees; ``created_at`` is in UTC, ``final`` marks the last one of a training."""

    step: int
    created_at: datetime
    digest: str
    final: bool


@dataclass(frozen=True, kw_only=True)
class ServingDecision:
    """Which checkpoint an evaluator serves.

    Attributes:
        step: Its step.
        digest: The SHA-256 that identifies its content.
        sequence: The number of the decision, from 1 on.
    """

    step: int
    digest: str
    sequence: int


@dataclass(frozen=True, kw_only=True)
class FleetServer:
    """A server that follows an evaluator.

    Attributes:
        name: Its name.
        address: The address that it calls from.
        software_version: The version of its software.
        connected: Whether it is connected.
        current: Whether it is connected and serves what was decided last.
        serving_step: The step that it serves, or served when it was last connected; None before the first.
        serving_digest: The digest of that checkpoint; empty before the first.
        serving_seconds: For how long it has served that; None before the first.
        lag_seconds: How long after a decision it served it, or, if it is behind, how long ago that was decided; None if
            it served it when it connected.
        reason: Why it does not serve what was decided last; empty if it does, or is about to.
        canary: Whether it is of the part that serves the version of a rollout.
    """

    name: str
    address: str
    software_version: str
    connected: bool
    current: bool
    serving_step: int | None
    serving_digest: str
    serving_seconds: float | None
    lag_seconds: float | None
    reason: str
    canary: bool = False


@dataclass(frozen=True, kw_only=True)
class ShadowCounts:
    """What came of the requests that a version computed once more, after the serving version had answered them.

    Attributes:
        compared: The requests whose answers were compared.
        disagreeing: The sum of the shares of their examples that differ.
        not_finite: Those of them with numbers that are not finite, and are in the serving version's answer.
        errors: The requests that failed, although the serving version answered them; they are not compared.
        dropped: The requests of the sample that were not computed, as the devices were busy or memory was short.
        largest_difference: The largest difference of two numbers, relative to the largest number of the output.
        seconds: What requests took that both versions computed alone, one after the other.
        serving_seconds: What the same requests took the serving version.
    """

    compared: int
    disagreeing: float
    not_finite: int
    errors: int
    dropped: int
    largest_difference: float
    seconds: float
    serving_seconds: float


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """A rollout that is under way.

    Attributes:
        step: The step that is rolled out.
        digest: The digest of its checkpoint.
        servers: The names of the servers that serve it; none if it only computes requests once more.
        elapsed_seconds: For how long one of them has served it, or has had it loaded to compute requests once more.
        after_seconds: After how long all serve it.
        shadow: What came of the requests that it computed once more; None for a canary.
        least_requests: How many of them it takes besides the time.
    """

    step: int
    digest: str
    servers: tuple[str, ...]
    elapsed_seconds: float
    after_seconds: float
    shadow: ShadowCounts | None = None
    least_requests: int = 0


@dataclass(frozen=True, kw_only=True)
class FleetStatus:
    """What an evaluator decided, and which servers carried that out.

    Attributes:
        decision: The present decision; None if nothing has been served yet.
        servers: The servers that follow, by name; those that left are listed for an hour.
        rollout: The rollout that is under way; None if there is none.
    """

    decision: ServingDecision | None
    servers: tuple[FleetServer, ...]
    rollout: Rollout | None = None


@dataclass(frozen=True, kw_only=True)
class Promotion:
    """The serving, previous and pinned steps after a change; None where there is none."""

    serving_step: int
    previous_step: int | None
    pinned_step: int | None


def _values_of(holder: Any) -> dict[str, Any]:
    return {each.name: getattr(holder, each.name) for each in fields(holder)}


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_are_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        return bool(np.all((one == other) | ((one != one) & (other != other))))  # noqa: PLR0124 - NaN
    return bool(one == other)
