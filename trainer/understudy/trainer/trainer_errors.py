"""The trainer's exceptions, and the exit codes that a supervisor reads.

TrainerError                    1  it could not train, for the reason that the text gives
├── TFConfigError               1  TF_CONFIG does not describe a cluster, or not this task
├── ClusterError                1  this task cannot take part in the cluster, or its tasks disagree
│   └── ClusterTimeoutError     7  the others did not come in time: start every task again, and they may
├── PeerLostError               4  another task died: start every task again, and training resumes
├── StrategyError               1  this machine cannot train as it was asked to
├── ModelError                  1  the loop cannot train this model
├── DataError                   1  the loop cannot train on this data
├── ResumeError                 1  the run folder's checkpoint does not continue this training
├── MetricsError                1  --metrics-port is taken
├── PublishError                1  a checkpoint could not be written; those before it stay
├── PreemptedError            143  SIGTERM came: what was trained is saved, and starting every task again goes on there
├── StopRuleError               1  --stop-when names what the evaluator does not score
├── EvaluationTimeoutError      6  training is done, but the last checkpoint was not evaluated in time
└── NonFiniteLossError          3  the loss or the weights became NaN or infinite; starting again will not help
"""

from __future__ import annotations

from typing import ClassVar, Final

RESTART_COUNT: Final = "UNDERSTUDY_RESTART_COUNT"
"""The environment variable by which a supervisor tells a task how often it was started again."""


class TrainerError(Exception):
    """The root of every exception that the trainer raises on purpose. Its text is meant for the user.

    Attributes:
        exit_code: The exit status of a process that ends with it.
    """

    exit_code: ClassVar[int] = 1


class TFConfigError(TrainerError):
    """TF_CONFIG is malformed. The text begins with the field at fault."""


class ClusterError(TrainerError):
    """This task cannot take part in the cluster, or its tasks disagree. The text names them."""


class ClusterTimeoutError(ClusterError):
    """The cluster did not come together in time. The text names the tasks that are missing; start every task again."""

    exit_code = 7


class PeerLostError(TrainerError):
    """Another task of the cluster died. Every task ends with this; start them all again."""

    exit_code = 4


class StrategyError(TrainerError):
    """The strategy asked for cannot work on this machine. The text says what is there."""


class ModelError(TrainerError):
    """The loop cannot train this model. The text says why, and what to change."""


class DataError(TrainerError):
    """The loop cannot train on this dataset. The text says why, and what to change."""


class ResumeError(TrainerError):
    """The newest checkpoint in the run folder does not continue this training. The text names the difference."""


class MetricsError(TrainerError):
    """The metrics cannot be served where they were asked for."""


class PublishError(TrainerError):
    """A checkpoint could not be written, as when the disk is full. Those before it stay as they are."""


class PreemptedError(TrainerError):
    """SIGTERM came to this task or another. If there was a step to save, it is published.

    Attributes:
        alone: Whether this task alone ends with it, since it had not joined its cluster yet; else all tasks do.
    """

    exit_code = 143  # 128 + SIGTERM, which schedulers take for "start it again"

    def __init__(self, message: str, *, alone: bool = False) -> None:
        super().__init__(message)
        self.alone = alone


class StopRuleError(TrainerError):
    """The rule that says when to stop names a dataset or a metric that the evaluator does not score."""


class EvaluationTimeoutError(TrainerError):
    """Training is done and published, but the evaluator did not settle the last checkpoint in time."""

    exit_code = 6


class NonFiniteLossError(TrainerError):
    """The loss or the weights are NaN or infinite. The last good checkpoint is the newest in the run folder."""

    exit_code = 3
