"""The trainer's exceptions, and the exit codes that a supervisor reads.

TrainerError                    1  training failed; the text gives the reason
├── TFConfigError               1  TF_CONFIG, or another variable, does not describe a cluster with this task
├── ClusterError                1  this task cannot take part in the cluster, or its tasks disagree
│   └── ClusterTimeoutError     7  other tasks did not arrive in time: start every task again
├── PeerLostError               4  another task died: start every task again, and training resumes
├── StrategyError               1  this machine does not support the configuration
├── ModelError                  1  the loop cannot train this model
├── DataError                   1  the loop cannot train on this data
├── StepError                   1  a step failed on its data or in the model
├── ResumeError                 1  the run folder's checkpoint does not continue this training
├── MetricsError                1  --metrics-port is in use
├── PublishError                1  a checkpoint could not be written; earlier ones remain
├── PreemptedError            143  SIGTERM: progress is saved; start every task again to resume
├── StopRuleError               1  --stop-when names what the evaluator does not score
├── EvaluationTimeoutError      6  training is done, but the last checkpoint was not evaluated in time
└── NonFiniteLossError          3  the loss or the weights became NaN or infinite; starting again will not help
"""

from __future__ import annotations

from typing import ClassVar, Final

RESTART_COUNT: Final = "UNDERSTUDY_RESTART_COUNT"
"""The environment variable in which a supervisor passes a task its number of restarts."""


class TrainerError(Exception):
    """The base class of the trainer's exceptions. The text is meant for the user.

    Attributes:
        exit_code: The process's exit status.
    """

    exit_code: ClassVar[int] = 1


class TFConfigError(TrainerError):
    """TF_CONFIG is malformed, or what it is derived from. The text begins with the invalid field or variable."""


class ClusterError(TrainerError):
    """This task cannot take part in the cluster, or its tasks disagree. The text names them."""


class ClusterTimeoutError(ClusterError):
    """The cluster did not form in time. The text names the missing tasks; start every task again."""

    exit_code = 7


class PeerLostError(TrainerError):
    """Another task of the cluster died. Every task raises this; start them all again."""

    exit_code = 4


class StrategyError(TrainerError):
    """The strategy cannot run on this machine. The text says which devices exist."""


class ModelError(TrainerError):
    """The loop cannot train this model. The text says why, and what to change."""


class DataError(TrainerError):
    """The loop cannot train on this dataset. The text says why, and what to change."""


class StepError(TrainerError):
    """A step failed on its data or in the model. The text says after which step, and why."""


class ResumeError(TrainerError):
    """The newest checkpoint in the run folder does not continue this training. The text names the difference."""


class MetricsError(TrainerError):
    """The metrics server cannot listen on its address."""


class PublishError(TrainerError):
    """A checkpoint could not be written, for example on a full disk. Earlier ones are unchanged."""


class PreemptedError(TrainerError):
    """This task or another received SIGTERM. The last step, if any, is published.

    Attributes:
        alone: Whether this task alone raises it, because it had not joined its cluster yet; else all tasks do.
    """

    exit_code = 143  # 128 + SIGTERM, which schedulers read as "start it again"

    def __init__(self, message: str, *, alone: bool = False) -> None:
        super().__init__(message)
        self.alone = alone


class StopRuleError(TrainerError):
    """The stop rule names a dataset or a metric that the evaluator does not score."""


class EvaluationTimeoutError(TrainerError):
    """Training is done and published, but the evaluator did not settle the last checkpoint in time."""

    exit_code = 6


class NonFiniteLossError(TrainerError):
    """The loss or the weights are NaN or infinite. The last good checkpoint is the newest in the run folder."""

    exit_code = 3


MENDED_BY_RESTART: Final = (PeerLostError, ClusterTimeoutError, PreemptedError)
"""After these, every task is to be started again, and training resumes."""
