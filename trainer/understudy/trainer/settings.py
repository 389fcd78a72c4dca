"""The settings of a training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from understudy.checkpoints.layout import RunDir
from understudy.checkpoints.signing import (
    REQUIRE_SIGNATURE,
    RUN_NAME,
    AcceptedKeys,
    Signer,
    SigningKey,
    accepted_keys,
    run_name,
)
from understudy.trainer.stopping import StopMode, parse_stop_rule

StrategyName = Literal["one_device", "mirrored", "multi_worker", "parameter_server", "tpu"]
CrossDeviceOpsName = Literal["auto", "nccl", "hierarchical_copy", "reduction_to_one_device"]
CommunicationName = Literal["auto", "ring", "nccl"]
RemainderName = Literal["drop", "keep"]


_LARGEST_PORT = 65_535
_LARGEST_SEED = 2**32 - 1  # of NumPy


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """The shape of a cluster, for systems whose variables do not describe it; see `cluster_variables.adopt`.

    Raises:
        ValueError: A value is out of range. The text begins with the field's name.
    """

    cluster_tasks: Mapping[str, int] = field(
        default_factory=dict,
        metadata={
            "help": "How many tasks of each role the cluster has, such as worker=3,evaluator=1, where TF_CONFIG is "
            "derived: under JobSet and Kubeflow's TrainJob always, under Slurm if not all tasks are workers. Numbered "
            "tasks get the roles in this order.",
            "metavar": "ROLE=N",
        },
    )
    cluster_port: int = field(
        default=2222,
        metadata={
            "help": "The port of each task where TF_CONFIG is derived; several tasks on one node use the following "
            "ports as well.",
            "metavar": "PORT",
        },
    )

    def __post_init__(self) -> None:
        for role, count in self.cluster_tasks.items():
            if count < 1:
                raise ValueError(f"cluster_tasks has {role}={count}; expected at least one task of each role")
        if not 0 < self.cluster_port <= _LARGEST_PORT:
            raise ValueError(f"cluster_port is {self.cluster_port}; expected 1 to {_LARGEST_PORT}")


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """The settings of a training. In a cluster, every task needs the same ones.

    Raises:
        ValueError: A value is out of range, or two contradict each other. The text begins with the field's name.
    """

    run_dir: Path = field(
        metadata={"help": "Folder for checkpoints, journal and summaries; shared by all tasks of a cluster."},
    )
    steps: int = field(metadata={"help": "Train until this many steps are done, counting those of earlier starts."})
    checkpoint_every: int = field(default=500, metadata={"help": "Publish a checkpoint every this many steps."})
    keep_checkpoints: int = field(
        default=5,
        metadata={
            "help": "How many of the newest checkpoints to keep, beside those that a running evaluator needs. "
            "One that is down for as many misses older ones."
        },
    )
    sign_key: Path | None = field(
        default=None,
        metadata={
            "help": "Sign each checkpoint with this private key, and resume only from signed ones; see understudy "
            "keygen.",
            "metavar": "FILE",
        },
    )
    require_signature: tuple[Path, ...] = field(default=(), metadata=REQUIRE_SIGNATURE)
    run_name: str | None = field(default=None, metadata=RUN_NAME)
    strategy: StrategyName = field(default="one_device", metadata={"help": "How to spread training over devices."})
    devices: tuple[str, ...] = field(
        default=(),
        metadata={"help": "Devices to train on, such as GPU:0,GPU:1; all GPUs, else the CPU, if not given."},
    )
    logical_cpus: int | None = field(
        default=None,
        metadata={"help": "Split the CPU into this many devices, to try out replicas without GPUs.", "metavar": "N"},
    )
    cross_device_ops: CrossDeviceOpsName = field(
        default="auto",
        metadata={"help": "How mirrored replicas add up their gradients."},
    )
    communication: CommunicationName = field(
        default="auto",
        metadata={"help": "How the workers of a cluster add up their gradients."},
    )
    tpu: str = field(
        default="local",
        metadata={"help": "Name or address of the TPU, for the tpu strategy.", "metavar": "NAME"},
    )
    global_batch_size: int | None = field(
        default=None,
        metadata={"help": "Examples per step over all replicas of all workers; the experiment's if not given."},
    )
    steps_per_call: int = field(
        default=20,
        metadata={"help": "Steps run inside one graph call; progress and summaries are written once per call."},
    )
    seed: int = field(default=0, metadata={"help": "Seed of the initial weights, the shuffling and the dropout."})
    cache: bool = field(default=True, metadata={"help": "Keep the training data in memory after the first read."})
    shuffle_buffer: int | None = field(
        default=None,
        metadata={"help": "Examples to shuffle among; the whole dataset if not given.", "metavar": "N"},
    )
    remainder: RemainderName = field(
        default="drop",
        metadata={
            "help": "What to do with an epoch's last examples that fill no batch: drop them, or begin the next "
            "epoch's first batch with them.",
        },
    )
    tensorboard: bool = field(default=True, metadata={"help": "Write TensorBoard scalars to RUN/tensorboard/train."})
    profile_steps: str | None = field(
        default=None,
        metadata={
            "help": "Write a TensorBoard profile of the chief's steps FROM to TO to RUN/tensorboard/train.",
            "metavar": "FROM,TO",
        },
    )
    stop_when: str | None = field(
        default=None,
        metadata={
            "help": "Stop early, at a checkpoint, when the evaluator's score has not improved in N evaluations; such "
            "as validation/loss:5.",
            "metavar": "DATASET/METRIC:N",
        },
    )
    stop_mode: StopMode | None = field(
        default=None,
        metadata={"help": "Whether less or more of the metric of --stop-when is better; min for a loss."},
    )
    wait_for_evaluation: float | None = field(
        default=None,
        metadata={
            "help": "When done, wait up to this long for the evaluator to settle the last checkpoint.",
            "metavar": "SECONDS",
        },
    )
    state_dir: Path | None = field(
        default=None,
        metadata={"help": "The evaluator's state folder, where its results are; RUN/evaluator if not given."},
    )
    metrics_port: int | None = field(
        default=None,
        metadata={"help": "Serve Prometheus metrics of this task on this port.", "metavar": "PORT"},
    )
    metrics_host: str = field(
        default="127.0.0.1",
        metadata={
            "help": "The address that --metrics-port listens on; 0.0.0.0 for every IPv4 address.",
            "metavar": "HOST",
        },
    )
    cluster_timeout_seconds: float = field(
        default=300.0,
        metadata={
            "help": "How long to wait at the start for the other tasks of the cluster, and as the chief for the lock "
            "of the run folder, which storage may still hold for a machine that was lost."
        },
    )

    def __post_init__(self) -> None:
        for name in ("steps", "checkpoint_every", "keep_checkpoints", "steps_per_call"):
            _require_positive(name, getattr(self, name))
        for name in ("logical_cpus", "global_batch_size", "shuffle_buffer", "metrics_port"):
            if getattr(self, name) is not None:
                _require_positive(name, getattr(self, name))
        if not 0 <= self.seed <= _LARGEST_SEED:
            raise ValueError(f"seed is {self.seed}; expected 0 to {_LARGEST_SEED}")
        if self.metrics_port is not None and self.metrics_port > _LARGEST_PORT:
            raise ValueError(f"metrics_port is {self.metrics_port}; expected 1 to {_LARGEST_PORT}")
        if self.cluster_timeout_seconds <= 0:
            raise ValueError(f"cluster_timeout_seconds is a positive time, not {self.cluster_timeout_seconds}")
        self._check_strategy()
        self._check_profile()
        self._check_evaluation()

    def _check_strategy(self) -> None:
        if self.strategy != "tpu" and self.tpu != "local":
            raise ValueError(f"tpu is for the tpu strategy; {self.strategy} does not use it")
        if self.strategy != "mirrored" and self.cross_device_ops != "auto":
            raise ValueError(f"cross_device_ops is for the mirrored strategy; {self.strategy} does not use it")
        if self.strategy != "multi_worker" and self.communication != "auto":
            raise ValueError(f"communication is for the multi_worker strategy; {self.strategy} does not use it")
        if self.strategy == "multi_worker" and self.logical_cpus is not None:
            raise ValueError("logical_cpus is for one machine; TensorFlow gives a worker without GPUs one CPU replica")
        if self.strategy in ("parameter_server", "tpu") and (self.devices or self.logical_cpus is not None):
            raise ValueError(f"strategy {self.strategy} finds its devices itself; leave out devices and logical_cpus")
        if self.strategy == "one_device" and len(self.devices) > 1:
            raise ValueError(
                f"devices names {len(self.devices)} devices; for more than one, choose the mirrored strategy"
            )
        if self.logical_cpus is not None and self.devices:
            raise ValueError("devices and logical_cpus exclude each other")
        if self.strategy == "one_device" and self.logical_cpus is not None:
            raise ValueError("logical_cpus makes replicas; one_device trains one")

    def _check_profile(self) -> None:
        if self.profile_range is not None and self.strategy == "parameter_server":
            raise ValueError("profile_steps is of a chief that trains; under parameter_server only its workers do")

    def _check_evaluation(self) -> None:
        if self.stop_when is not None:
            try:
                parse_stop_rule(self.stop_when, self.stop_mode)
            except ValueError as error:
                raise ValueError(f"stop_when {error}") from error
        elif self.stop_mode is not None:
            raise ValueError("stop_mode goes with stop_when, which says what to watch")
        if self.wait_for_evaluation is not None and self.wait_for_evaluation <= 0:
            raise ValueError(f"wait_for_evaluation is a positive time, not {self.wait_for_evaluation}")

    @property
    def profile_range(self) -> tuple[int, int] | None:
        """The first and the last step to profile, counted from 1."""
        if self.profile_steps is None:
            return None
        first, _, last = self.profile_steps.partition(",")
        if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last) <= self.steps):
            raise ValueError(
                f"profile_steps is {self.profile_steps!r}; give two steps from 1 to {self.steps}, such as 10,20"
            )
        return int(first), int(last)

    @property
    def evaluator_state_dir(self) -> Path:
        """The folder of the evaluator's results."""
        return RunDir(self.run_dir).evaluator if self.state_dir is None else self.state_dir

    def signer(self) -> Signer | None:
        """Return what signs the checkpoints, or None if they are not signed.

        Raises:
            understudy.checkpoints.checkpoint_errors.KeyFileError: The private key cannot be used.
        """
        if self.sign_key is None:
            return None
        return Signer(key=SigningKey.read(self.sign_key), run=self.run_name or run_name(self.run_dir))

    def accepted_keys(self) -> AcceptedKeys | None:
        """Return the keys of which one must have signed a checkpoint to resume from; None if it need not be signed.

        Where public keys are given, the tasks that do not publish need no private key.

        Raises:
            understudy.checkpoints.checkpoint_errors.KeyFileError: A key cannot be used.
        """
        public = accepted_keys(self.require_signature, run=self.run_name, folder=self.run_dir)
        signer = None
        if self.sign_key is not None and (public is None or self.sign_key.exists()):
            signer = self.signer()
        if public is None or signer is None:
            return public or (None if signer is None else signer.accepted)
        return public.also(signer.accepted)


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} is at least 1, not {value}")
