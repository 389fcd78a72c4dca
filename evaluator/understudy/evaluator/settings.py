"""The operator's settings for the evaluator, and the location of its checkpoints and data."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from understudy.checkpoints.layout import RunDir, step_name
from understudy.checkpoints.signing import REQUIRE_SIGNATURE, RUN_NAME
from understudy.evaluator.evaluator_errors import ConfigurationError
from understudy.evaluator.rollout_plan import parse_rollout
from understudy.evaluator.succession import EVALUATOR_ID
from understudy.experiments import check_spec

VersionPolicy = Literal["latest", "best"]
EvaluationPolicy = Literal["every", "latest"]
MonitorMode = Literal["min", "max"]
Precision = Literal["exact", "fast"]

FOLLOW: Mapping[str, str] = {
    "help": "Serve what another evaluator serves, and score nothing: the addresses to call it at, which are tried in "
    "turn, or its state folder, such as RUN/evaluator. Give this server a --state-dir of its own. Promote is refused.",
    "metavar": "HOST:PORT,...|DIR",
}
"""The metadata of the setting."""

_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}")

MIN_SLOTS = 2
"""One for the serving version, and one to load the next checkpoint into."""


DEFAULT_MAX_BATCH_SIZE = 256
"""For each replica, until a better one is found."""


@dataclass(frozen=True, kw_only=True)
class EvaluatorSettings:
    """All settings, validated. Each field's metadata holds its help text for the command line.

    Raises:
        ConfigurationError: A value is out of its range. The text names the field, the value and the range.
    """

    state_dir: Path = field(
        metadata={"help": "Folder of the ledger, the results and the leased checkpoints.", "metavar": "DIR"}
    )
    devices: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "Devices to run replicas on, such as GPU:0,GPU:1, or GPU for all; GPUs that are not named are "
            "hidden. By default all GPUs, else the CPU.",
            "metavar": "NAMES",
        },
    )
    logical_cpus: int | None = field(
        default=None,
        metadata={"help": "Split the CPU into this many devices, one replica each, and hide GPUs.", "metavar": "N"},
    )
    gpu_memory_limit_mib: int | None = field(
        default=None, metadata={"help": "The most memory to take on each GPU, in MiB.", "metavar": "MIB"}
    )
    precision: Precision = field(
        default="exact",
        metadata={
            "help": "How GPUs multiply float32: exact computes in float32; fast uses TF32, whose factors have 10 bits.",
            "choices": ("exact", "fast"),
        },
    )
    intra_op_threads: int | None = field(
        default=None,
        metadata={
            "help": "Threads that one operation may use; found by --self-tuning unless given. At first the cores are "
            "shared out among several replicas on the CPU.",
            "metavar": "N",
        },
    )
    inter_op_threads: int | None = field(
        default=None,
        metadata={
            "help": "Operations that may run at the same time; found by --self-tuning unless given. At first at least "
            "one for each replica on the CPU.",
            "metavar": "N",
        },
    )
    slots: int = field(
        default=3,
        metadata={"help": "Checkpoints held in memory at most: serving, incoming, on-demand versions.", "metavar": "N"},
    )
    version_policy: VersionPolicy | int = field(
        default="latest",
        metadata={"help": "Which checkpoint to serve: latest, best or a step.", "metavar": "latest|best|STEP"},
    )
    follow: str | None = field(default=None, metadata=FOLLOW)
    follow_download_mib: int = field(
        default=16384,
        metadata={
            "help": "With --follow HOST:PORT, the most that checkpoints take in the state folder that the evaluator "
            "sent because --run-dir does not have them, in MiB.",
            "metavar": "MIB",
        },
    )
    replaces_evaluator: str = field(
        default="",
        metadata={
            "help": "Have servers that follow the evaluator of this identity go over to this one: its run was trained "
            "anew while no evaluator watched. They log the identity, and status --fleet has it. Once is enough.",
            "metavar": "ID",
        },
    )
    monitor: str | None = field(
        default=None,
        metadata={
            "help": "The metric that says which checkpoint is best; the first dataset's loss by default.",
            "metavar": "DATASET/METRIC",
        },
    )
    monitor_mode: MonitorMode | None = field(
        default=None,
        metadata={
            "help": "Whether less or more of the monitored metric is better; min for a loss, to be given for others.",
            "choices": ("min", "max"),
        },
    )
    min_value: float | None = field(
        default=None,
        metadata={
            "help": "A gate: serve only checkpoints whose monitored value is at least this good (where less is better, "
            "at most this).",
            "metavar": "VALUE",
        },
    )
    min_improvement: float | None = field(
        default=None,
        metadata={
            "help": "A gate: serve only checkpoints whose monitored value is better than the serving version's by this "
            "much.",
            "metavar": "VALUE",
        },
    )
    gate: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "A condition to serve a checkpoint, such as 'test/accuracy >= 0.9' or 'test/accuracy[label=3] not "
            "worse by 0.01 than best at 95%'; all must be met. Separate several in one text with semicolons, and write "
            r"a semicolon in a slice as \;",
            "metavar": "CONDITION",
            "separator": ";",
        },
    )
    when_undecided: str = field(
        default="keep",
        metadata={
            "help": "If the examples are too few to decide a gate at its confidence: keep the present version, serve "
            "the new one, or decide on this dataset, which no other checkpoint is scored on.",
            "metavar": "keep|serve|DATASET",
        },
    )
    rollout: str | None = field(
        default=None,
        metadata={
            "help": "Serve a new version on this share of the servers that follow over the network first (canary), or "
            "let it compute this share of the requests once more, after they are answered (shadow). After this time "
            "serve it on all; take it back if it does clearly worse. By default all serve it at once.",
            "metavar": "canary=SHARE%|shadow=SHARE%,after=TIME",
        },
    )
    evaluation_policy: EvaluationPolicy | int = field(
        default="every",
        metadata={
            "help": "Which checkpoints to evaluate: every one, the latest when several wait, or one in K (the first, "
            "every Kth after it, and the final one).",
            "metavar": "every|latest|K",
        },
    )
    max_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Examples that one call of the model takes at most on each replica; found by --self-tuning unless "
            f"given, {DEFAULT_MAX_BATCH_SIZE} at first.",
            "metavar": "EXAMPLES",
        },
    )
    max_queue_examples: int = field(
        default=4096,
        metadata={
            "help": "Examples that may wait for a device, and an eighth more of callers that have few waiting.",
            "metavar": "EXAMPLES",
        },
    )
    max_queue_mib: int = field(
        default=1024,
        metadata={
            "help": "The most memory that the inputs of predictions may hold while they wait for a device, in MiB, and "
            "an eighth more of callers that have little waiting; a request that waits alone may hold more.",
            "metavar": "MIB",
        },
    )
    max_batch_delay_ms: float | None = field(
        default=None,
        metadata={
            "help": "How long a batch waits for more requests, in milliseconds. Unless given, it waits only for "
            "requests that are likely to follow, as long as --self-tuning finds that it pays.",
            "metavar": "MS",
        },
    )
    concurrent_batches: int | None = field(
        default=None,
        metadata={
            "help": "Batches of predictions that may run at the same time, for models that do not use all cores; found "
            "by --self-tuning unless given, 1 at first. Has no effect with GPUs.",
            "metavar": "N",
        },
    )
    self_tuning: bool = field(
        default=True,
        metadata={
            "help": "Find threads, batch size and waiting for the served model by trials in processes of low priority, "
            "once it has served for a while; the state folder keeps what was found. Has no effect with GPUs."
        },
    )
    inline_batches: bool = field(
        default=True,
        metadata={
            "help": "Compute batches that take less than a millisecond on the event loop's thread; has no effect with "
            "GPUs."
        },
    )
    frozen_memory_mib: int = field(
        default=512,
        metadata={
            "help": "MiB of memory that constants for the weights of the serving version may take, with which Predict "
            "is faster for many models; 0 for none. They take about 7 times the size of the weights on each replica, "
            "and 50 KiB for each operation.",
            "metavar": "MIB",
        },
    )
    evaluation_batch_size: int = field(
        default=256, metadata={"help": "Examples in a batch when a dataset is scored.", "metavar": "EXAMPLES"}
    )
    cluster: str | None = field(
        default=None,
        metadata={
            "help": "Compute the evaluations of checkpoints on all nodes of a Ray cluster, HOST:PORT, or auto for the "
            "one that this machine is part of. It must have a token, and its nodes read the datasets from the same "
            "paths. While it cannot be used, evaluations wait for it.",
            "metavar": "ADDRESS",
        },
    )
    tables: bool = field(
        default=False,
        metadata={
            "help": "Record tables with every evaluation: confusions, curves, residuals, the hardest examples, and "
            "which examples were decided rightly. For `understudy report` and `understudy examples`."
        },
    )
    slice: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "Score these parts of each dataset, too: label, predicted or a feature; age:18,30,65 in buckets, "
            "age:q4 in quantiles; country*label crossed. Repeat the option, or separate by semicolons; in a name, "
            "write a backslash before * : and ;",
            "metavar": "FEATURE",
            "separator": ";",
        },
    )
    slice_min_examples: int = field(
        default=1, metadata={"help": "Slices with fewer examples have no metrics.", "metavar": "N"}
    )
    resamples: int = field(
        default=0,
        metadata={
            "help": "How many times to resample the examples of a dataset for the intervals of its metrics and "
            "slices; 0 for no intervals.",
            "metavar": "N",
        },
    )
    confidence: float = field(
        default=0.95, metadata={"help": "The confidence level of the intervals.", "metavar": "SHARE"}
    )
    max_device_failures: int = field(
        default=5,
        metadata={
            "help": "After this many runs in a row that fail by a device's fault the service is no longer ready; after "
            "twice as many it ends, with status 8.",
            "metavar": "N",
        },
    )
    stream_idle_timeout_seconds: float = field(
        default=60.0,
        metadata={"help": "How long an Evaluate or Replay stream may be silent, in seconds.", "metavar": "SECONDS"},
    )
    keep_evaluations: int | None = field(
        default=None,
        metadata={
            "help": "How many entries the ledger keeps, about; the oldest are removed, except those of checkpoints "
            "that still exist. All by default.",
            "metavar": "N",
        },
    )
    poll_interval_seconds: float = field(
        default=0.5, metadata={"help": "Interval of the polls for new checkpoints, in seconds.", "metavar": "SECONDS"}
    )
    allow_unsafe_models: bool = field(
        default=False,
        metadata={
            "help": "Load models that name any class, function or operation, which can run code and use files of this "
            "machine. Only for checkpoints of people you trust."
        },
    )
    require_signature: tuple[Path, ...] = field(default=(), metadata=REQUIRE_SIGNATURE)
    run_name: str | None = field(default=None, metadata=RUN_NAME)
    load_attempts: int = field(
        default=3,
        metadata={"help": "Attempts to load a checkpoint that fails before it is given up.", "metavar": "N"},
    )
    load_retry_seconds: float = field(
        default=1.0,
        metadata={
            "help": "The wait before the second attempt, in seconds; it doubles each time.",
            "metavar": "SECONDS",
        },
    )

    def __post_init__(self) -> None:
        self._check_at_least("slots", MIN_SLOTS)
        for name in (
            "evaluation_batch_size",
            "load_attempts",
            "max_device_failures",
            "max_queue_mib",
            "follow_download_mib",
        ):
            self._check_at_least(name, 1)
        self._check_numbers_if_given()
        self._check_at_least("max_queue_examples", self.max_batch_size or 1)
        self._check_at_least("frozen_memory_mib", 0)
        self._check_durations()
        if self.monitor_mode not in ("min", "max", None):
            raise ConfigurationError(f"monitor_mode is {self.monitor_mode!r}; give min or max")
        if self.precision not in ("exact", "fast"):
            raise ConfigurationError(f"precision is {self.precision!r}; give exact or fast")
        if self.evaluation_policy not in ("every", "latest") and not (
            isinstance(self.evaluation_policy, int) and self.evaluation_policy >= 1
        ):
            raise ConfigurationError(
                f"evaluation_policy is {self.evaluation_policy!r}; give every, latest, or a number from 1 up"
            )
        if self.keep_evaluations is not None:
            self._check_at_least("keep_evaluations", 1)
            if isinstance(self.evaluation_policy, int) and self.evaluation_policy > 1:
                raise ConfigurationError(
                    "keep_evaluations goes with evaluation_policy every or latest; one in K counts from the first entry"
                )
        self._check_gate()
        self._check_follow()
        self._check_rollout()
        if isinstance(self.version_policy, str) and self.version_policy not in ("latest", "best"):
            raise ConfigurationError(f"version_policy is {self.version_policy!r}; give latest, best or a step")

    def _check_numbers_if_given(self) -> None:
        for name, least in (("max_batch_size", 1), ("concurrent_batches", 1), ("max_batch_delay_ms", 0)):
            if getattr(self, name) is not None:
                self._check_at_least(name, least)

    def _check_durations(self) -> None:
        for name in ("stream_idle_timeout_seconds", "poll_interval_seconds", "load_retry_seconds"):
            if getattr(self, name) <= 0:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; give more than 0 seconds")

    def _check_gate(self) -> None:
        if self.gate and isinstance(self.version_policy, int):
            raise ConfigurationError(
                f"gate goes with version_policy latest or best; step {self.version_policy} is served anyhow"
            )
        for name in ("min_value", "min_improvement"):
            value = getattr(self, name)
            if value is None:
                continue
            if not math.isfinite(value):
                raise ConfigurationError(f"{name} is {value}; give a finite number")
            if isinstance(self.version_policy, int):
                raise ConfigurationError(
                    f"{name} goes with version_policy latest or best; step {self.version_policy} is served anyhow"
                )
        if self.min_improvement is not None:
            self._check_at_least("min_improvement", 0)

    def _check_follow(self) -> None:
        if self.replaces_evaluator and not EVALUATOR_ID.fullmatch(self.replaces_evaluator):
            raise ConfigurationError(
                f"replaces_evaluator is {self.replaces_evaluator!r}; give the identity of an evaluator, 32 hexadecimal "
                "digits, which the servers that follow it log, and status --fleet shows"
            )
        if self.follow is None:
            return
        if self.cluster is not None:
            raise ConfigurationError("cluster goes without follow, with which another evaluator scores")
        decided_elsewhere = {"version_policy": "latest", "monitor": None, "min_value": None, "min_improvement": None}
        for name, default in {**decided_elsewhere, "gate": (), "rollout": None, "replaces_evaluator": ""}.items():
            if getattr(self, name) != default:
                raise ConfigurationError(f"{name} goes without follow, with which another evaluator decides")

    def _check_rollout(self) -> None:
        if self.rollout is not None:
            parse_rollout(self.rollout)
            if isinstance(self.version_policy, int):
                raise ConfigurationError(
                    f"rollout goes with version_policy latest or best; step {self.version_policy} is served anyhow"
                )

    @property
    def follow_folder(self) -> Path | None:
        """The state folder of the evaluator to follow; None without, or if it is called at addresses."""
        return None if self.follow is None or addresses_of(self.follow) else Path(self.follow)

    def _check_at_least(self, name: str, least: float) -> None:
        if getattr(self, name) < least:
            raise ConfigurationError(f"{name} is {getattr(self, name)}; give at least {least}")


@dataclass(frozen=True, kw_only=True)
class CheckpointLocation:
    """The location of the checkpoints and of the data to score them on.

    Attributes:
        folder: A run folder of the trainer, or a folder that another program writes checkpoints to; or its URL.
        is_run: Whether it is a run folder.
        experiment: The argument for `understudy.experiments.load_experiment`, or None.
        eval_data: Paths for `understudy.evaluator.datasets.dataset_files.open_dataset`, by the name of the dataset.
    """

    folder: Path
    is_run: bool
    experiment: str | None = None
    eval_data: Mapping[str, Path] = field(default_factory=dict)

    def check(self) -> None:
        """Check what can be checked before TensorFlow starts.

        Raises:
            ConfigurationError: A dataset does not exist.
            ExperimentError: The experiment's file does not exist.
        """
        for name, path in self.eval_data.items():
            check_exists(name, path)
        if self.experiment is not None:
            check_spec(self.experiment)

    @property
    def url(self) -> str | None:
        """The folder as a URL, or None for a local folder. A `Path` made from a URL has lost one of its slashes."""
        match = re.match(r"([a-z][a-z0-9+.-]+):/+", str(self.folder))
        return None if match is None else f"{match[1]}://{str(self.folder)[match.end() :]}"

    def local_folder(self, state_dir: Path) -> Path:
        """Return the folder, or where it is mirrored in the evaluator's state folder if it is a URL."""
        return self.folder if self.url is None else state_dir / "mirror"

    def checkpoint_uri(self, step: int) -> str:
        """Return where the checkpoint of a step is in a run folder; otherwise the folder of all, as a URI."""
        if self.is_run and self.url is not None:
            return f"{self.url}/checkpoints/{step_name(step)}"
        if self.is_run:
            return RunDir(self.folder.resolve()).checkpoint(step).as_uri()
        return self.url or self.folder.resolve().as_uri()


def addresses_of(follow: str | None) -> tuple[str, ...]:
    """Return the addresses of the evaluator to follow; none if it is followed through its state folder."""
    parts = [part.strip() for part in (follow or "").split(",")]
    return tuple(parts) if all(map(_ADDRESS.fullmatch, parts)) else ()


def check_exists(dataset: str, path: Path) -> None:
    """Raise ConfigurationError if there is no such file of a dataset."""
    if not path.exists():
        raise ConfigurationError(f"dataset {dataset!r}: there is no file {path}; it has to be there at the start")
