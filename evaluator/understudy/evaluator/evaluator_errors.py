"""The evaluator's exceptions.

EvaluatorError
├── InvalidInputError             the caller's data does not fit the model
├── VersionNotFoundError          there is no such version, or it is not loaded
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
└── StorageError                  another file of the evaluator cannot be written

The service maps each to one gRPC status; any other exception is a defect and becomes INTERNAL.
"""

from __future__ import annotations


class EvaluatorError(Exception):
    """Base class of the evaluator's exceptions. The text is meant for the caller."""


class InvalidInputError(EvaluatorError):
    """The caller's data does not fit the model. The text names the tensor, its actual and its expected form."""


class ModelChangedError(EvaluatorError):
    """The serving model changed while a request waited, and has other inputs now. The text names them."""


class VersionNotFoundError(EvaluatorError):
    """There is no such version, or it is not loaded. The text names the available versions."""


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
    """The machine currently lacks memory, file descriptors or disk space. A retry may succeed later."""


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
