"""The evaluator's exceptions.

EvaluatorError
├── InvalidInputError             the caller's data does not fit the model
├── VersionNotFoundError          there is no such version, or it is not loaded
├── DatasetNotFoundError          the evaluator has no such dataset
├── ModelChangedError             the serving model changed while a request waited that does not fit the new one
├── NotReadyError                 no servable is serving yet
├── DrainingError                 the evaluator is shutting down
├── OverloadedError               a queue or every slot is taken
├── OutOfResourcesError           the machine has not enough memory, file descriptors or disk space now
├── DeadlineExceededError         the caller's deadline passed before the work began
├── CancelledError                the caller went away before the work began
├── StreamIdleError               an evaluation stream was silent for too long
├── NotEvaluableError             the model carries no loss or metrics to score it with
├── ConfigurationError            a setting or a dataset cannot be used
├── DeviceError                   the devices asked for cannot be had
├── LoadError                     a checkpoint could not be loaded
│   └── ArchitectureMismatchError its model is not the one the slot was built for
├── LedgerError                   the ledger cannot be read or written
└── StorageError                  another file of the evaluator's own cannot be written

The service maps each to one gRPC status; anything else is a defect and becomes INTERNAL.
"""

from __future__ import annotations


class EvaluatorError(Exception):
    """The root of every exception that the evaluator raises on purpose. Its text is meant for the caller."""


class InvalidInputError(EvaluatorError):
    """The caller's data does not fit the model. The text names the tensor, what came and what was expected."""


class ModelChangedError(EvaluatorError):
    """The serving model changed while a request waited, and takes something else now. The text says what."""


class VersionNotFoundError(EvaluatorError):
    """There is no such version, or it is not loaded. The text names the versions there are."""


class DatasetNotFoundError(EvaluatorError):
    """The evaluator has no such dataset. The text names the datasets there are."""


class NotReadyError(EvaluatorError):
    """No servable is serving yet."""


class DrainingError(EvaluatorError):
    """The evaluator is shutting down and takes no new work."""


class OverloadedError(EvaluatorError):
    """A bounded queue is full, or every slot is taken.

    Args:
        message: What is full, and how full.
        retry_after_seconds: When trying again is likely to succeed.
    """

    def __init__(self, message: str, *, retry_after_seconds: float = 0.1) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class OutOfResourcesError(EvaluatorError):
    """The machine has not enough memory, file descriptors or disk space now. The same may succeed later."""


class DeadlineExceededError(EvaluatorError):
    """The caller's deadline passed before the work reached a device."""


class CancelledError(EvaluatorError):
    """The caller went away before the work reached a device."""


class StreamIdleError(EvaluatorError):
    """An evaluation stream was silent for longer than it may be."""


class NotEvaluableError(EvaluatorError):
    """The model carries no loss and no metrics, and the caller named none."""


class ConfigurationError(EvaluatorError, ValueError):
    """A setting or a dataset cannot be used. The text names it, what came, what was expected and the remedy."""


class DeviceError(EvaluatorError):
    """The devices asked for cannot be had. The text names those there are."""


class LoadError(EvaluatorError):
    """A checkpoint could not be loaded. The text says which and why."""


class ArchitectureMismatchError(LoadError):
    """The checkpoint's model is not the one the slot was built for. Another slot can hold it."""


class LedgerError(EvaluatorError):
    """The ledger cannot be read or written. The text names the file and the remedy."""


class StorageError(EvaluatorError):
    """A file of the evaluator's own cannot be written, as on a full disk. The text names it and the remedy."""
