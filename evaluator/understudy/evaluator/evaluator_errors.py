"""The evaluator's exceptions, and which resource lacks by the errors of libraries.

EvaluatorError
├── InvalidInputError             the caller's data does not fit the model
├── VersionNotFoundError          there is no such version, or it is not loaded
├── NoEarlierVersionError         there is no version to roll back to
├── DatasetNotFoundError          the evaluator has no such dataset
├── ModelChangedError             the serving model changed while the request waited, and the request does not fit it
├── NotReadyError                 no servable is serving yet
├── DrainingError                 the evaluator is shutting down
├── OverloadedError               a queue or every slot is taken
├── OutOfResourcesError           the machine currently lacks memory, file descriptors or disk space
├── DeadlineExceededError         the caller's deadline passed before the work began
├── CancelledError                the caller went away before the work began
├── StreamIdleError               an evaluation stream was idle for too long
├── NotEvaluableError             the model has no loss or metrics to score it with
├── ConfigurationError            a setting or a dataset cannot be used
├── DeviceError                   the requested devices are not available
├── LoadError                     a checkpoint could not be loaded
│   └── ArchitectureMismatchError its model is not the one the slot was built for
├── LedgerError                   the ledger cannot be read or written
├── StorageError                  another file of the evaluator cannot be written
└── ClusterError                  the cluster that evaluates cannot be used now

The service maps each to one gRPC status; any other exception is a defect and becomes INTERNAL.

NotFrozenError                    a model's weights stay variables; never reaches a caller
├── NoFasterError                 constants make it no faster
└── FreezingCancelledError        another version is serving

TrialError                        the cost of a model's calls could not be measured; never reaches a caller
AnotherEvaluatorError             at an address is not the evaluator that was followed so far; never reaches a caller
"""

from __future__ import annotations

import enum
import errno
import heapq
import re
from collections.abc import Collection, Iterator

from understudy.checkpoints.checkpoint_errors import (
    MACHINE_ERRNOS,
    CheckpointError,
    LocationGoneError,
    RemoteStorageError,
)


class EvaluatorError(Exception):
    """Base class of the evaluator's exceptions. The text is meant for the caller."""


class InvalidInputError(EvaluatorError):
    """The caller's data does not fit the model. The text names the tensor, its actual and its expected form."""


class ModelChangedError(EvaluatorError):
    """The serving model changed while a request waited, and has other inputs now. The text names them."""


class VersionNotFoundError(EvaluatorError):
    """There is no such version, or it is not loaded. The text names the available versions."""


class NoEarlierVersionError(EvaluatorError):
    """There is no version to roll back to. The text names the versions that can be pinned."""


class DatasetNotFoundError(EvaluatorError):
    """The evaluator has no such dataset. The text names the available datasets."""


class NotReadyError(EvaluatorError):
    """No servable is serving yet."""


class DrainingError(EvaluatorError):
    """The evaluator is shutting down and takes no new work."""


class OverloadedError(EvaluatorError):
    """A bounded queue is full, or every slot is taken.

    Args:
        message: What is full, and how full.
        retry_after_seconds: The delay after which a retry is likely to succeed.
    """

    def __init__(self, message: str, *, retry_after_seconds: float = 0.1) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class OutOfResourcesError(EvaluatorError):
    """The machine lacks memory, file descriptors, disk space or a disk that works. A retry may succeed later."""


class DeadlineExceededError(EvaluatorError):
    """The caller's deadline passed before the work reached a device."""


class CancelledError(EvaluatorError):
    """The caller went away before the work reached a device."""


class StreamIdleError(EvaluatorError):
    """An evaluation stream was idle for longer than the limit."""


class NotEvaluableError(EvaluatorError):
    """The model has no loss and no metrics, and the caller named none."""


class ConfigurationError(EvaluatorError, ValueError):
    """A setting or a dataset cannot be used. The text names it, the actual and expected values, and the remedy."""


class DeviceError(EvaluatorError):
    """The requested devices are not available. The text names the available ones."""


class LoadError(EvaluatorError):
    """A checkpoint could not be loaded. The text names the checkpoint and the cause."""


class ArchitectureMismatchError(LoadError):
    """The checkpoint's model is not the one the slot was built for. Another slot can hold it."""


class LedgerError(EvaluatorError):
    """The ledger cannot be read or written. The text names the file and the remedy."""


class StorageError(EvaluatorError):
    """A file of the evaluator cannot be written, for example on a full disk. The text names it and the remedy."""


class ClusterError(EvaluatorError):
    """The cluster that computes evaluations cannot be used now; a retry may succeed. The text gives the reason."""


class AnotherEvaluatorError(Exception):
    """The evaluator at an address is not the one that was followed so far."""


class NotFrozenError(Exception):
    """The weights of a model stay variables, for this reason."""


class NoFasterError(NotFrozenError):
    """Constants make a model no faster. The text has the measured ratios."""


class FreezingCancelledError(NotFrozenError):
    """Another version is serving, or the evaluator is shutting down."""


class TrialError(Exception):
    """The cost of a model's calls could not be measured, for this reason."""


_MOST_NAMED_STEPS = 10

_MEMORY_ERRNOS = {errno.ENOMEM}
_OTHER_TEXT = re.compile(
    r"no space left on device|disk quota exceeded|too many open files|input/output error|stale (NFS )?file handle|"
    r"read-only file system|transport endpoint is not connected|host is down|no route to host",
    re.IGNORECASE,
)
_MEMORY_TEXT = re.compile(
    r"out of memory|\boom when allocating|fail(ed|ure) to allocate|bad_alloc|(cannot|unable to) allocate|"
    r"memory allocation failed|resource_exhausted|cuda_error_out_of_memory|_status_alloc_failed|\bMemoryError\b",
    re.IGNORECASE,
)


def available_steps(known: Collection[int], missing: int) -> str:
    """Return the steps there are, for the message of an error: all of a few, else those around the missing one."""
    if len(known) <= _MOST_NAMED_STEPS:
        return f"there are {list(known) or 'none'}"
    nearest = heapq.nsmallest(_MOST_NAMED_STEPS, known, key=lambda step: abs(step - missing))
    return f"there are {len(known)}, the nearest of which are {sorted(nearest)}"


class Resource(enum.Enum):
    """A resource that a machine may run out of."""

    MEMORY = "memory"
    OTHER = "disk space, file descriptors, processor time, or a disk or remote storage that works"


def exhausted_resource(error: BaseException) -> Resource | None:
    """Return the resource that the machine ran out of, or None if the error has another cause.

    Such an error says nothing about the checkpoint or dataset: a retry may succeed. TensorFlow, CUDA, HDF5 and Keras
    report it as errors of many classes, some of which wrap others, so texts are searched as well.
    """
    chain = list(with_causes(error))
    is_damaged = any(isinstance(link, CheckpointError) for link in chain)
    found = (_by_kind(link) or (None if is_damaged else _by_text(link)) for link in chain)
    return next(filter(None, found), None)


def blame_machine(error: Exception) -> Exception:
    """Return an `OutOfResourcesError` if the machine ran out of a resource, else the error unchanged."""
    resource = exhausted_resource(error)
    if resource is None or isinstance(error, OutOfResourcesError):
        return error
    text = str(error).strip().split("\n", maxsplit=1)[0] or type(error).__name__
    blamed = OutOfResourcesError(f"the machine has not enough {resource.value} for this now: {text}")
    blamed.__cause__ = error
    return blamed


def without_frames(error: Exception) -> Exception:
    """Return the error, without tracebacks if its text is meant for the caller.

    A traceback holds the frames of the failed work, and with them its arrays and the future whose outcome the error
    is: a cycle, which would stay in memory until Python looks for cycles. The traceback of a defect is logged.
    """
    if isinstance(error, EvaluatorError):
        link: BaseException | None = error
        while link is not None:
            link = link.with_traceback(None).__cause__ or link.__context__
    return error


def _by_kind(error: BaseException) -> Resource | None:
    if isinstance(error, MemoryError | OutOfResourcesError):
        return Resource.MEMORY
    if isinstance(error, LocationGoneError | RemoteStorageError):
        return Resource.OTHER
    if isinstance(error, OSError) and error.errno in _MEMORY_ERRNOS | MACHINE_ERRNOS:
        return Resource.MEMORY if error.errno in _MEMORY_ERRNOS else Resource.OTHER
    return None


def _by_text(error: BaseException) -> Resource | None:
    if isinstance(error, EvaluatorError):  # our own text, whose cause is checked separately
        return None
    text = str(error)
    if _OTHER_TEXT.search(text):
        return Resource.OTHER
    if type(error).__name__ == "ResourceExhaustedError" or _MEMORY_TEXT.search(text):
        return Resource.MEMORY
    return None


def with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes, each once, as a traceback shows them."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
