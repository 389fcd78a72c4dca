"""What can be set about the service."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from understudy.service.errors import SettingsError

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "json", "console"]

_LARGEST_PORT = 65535
_LARGEST_MESSAGE_MIB = 2047


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Every setting of the service but the evaluator's, which are `understudy.evaluator.settings.EvaluatorSettings`.

    Raises:
        SettingsError: A value is out of range, or it is not clear which checkpoints to serve.
    """

    run_dir: Path | None = field(
        default=None,
        metadata={"help": "The run folder a trainer publishes its checkpoints to.", "metavar": "RUN"},
    )
    checkpoints: Path | None = field(
        default=None,
        metadata={
            "help": "A folder of .keras files that another program writes; instead of --run-dir.",
            "metavar": "DIR",
        },
    )
    experiment: str | None = field(
        default=None,
        metadata={
            "help": "The experiment whose datasets to score: a bundled name, package.module:object or file.py:object.",
            "metavar": "EXPERIMENT",
        },
    )
    eval_data: tuple[str, ...] = field(
        default=(),
        metadata={"help": "Datasets to score, each NAME=FILE.npz, separated by commas.", "metavar": "NAME=FILE,..."},
    )
    host: str = field(default="127.0.0.1", metadata={"help": "The address to listen on.", "metavar": "HOST"})
    grpc_port: int = field(default=8500, metadata={"help": "The port for gRPC; 0 takes a free one.", "metavar": "PORT"})
    http_port: int = field(
        default=8501,
        metadata={"help": "The port for /metrics, /healthz and /readyz; 0 takes a free one.", "metavar": "PORT"},
    )
    model_name: str | None = field(
        default=None,
        metadata={
            "help": "The name the model is served under; by default the experiment's, else 'model'.",
            "metavar": "NAME",
        },
    )
    max_message_mib: int = field(
        default=256, metadata={"help": "The largest message to take or send, in MiB.", "metavar": "MIB"}
    )
    stream_depth: int = field(
        default=64,
        metadata={"help": "How many requests of one PredictStream may be under way at once.", "metavar": "N"},
    )
    drain_seconds: float = field(
        default=30.0,
        metadata={"help": "How long calls under way may take to finish after SIGTERM.", "metavar": "SECONDS"},
    )
    log_level: LogLevel = field(
        default="info",
        metadata={"help": "The least important log lines to write.", "choices": ("debug", "info", "warning", "error")},
    )
    log_format: LogFormat = field(
        default="auto",
        metadata={
            "help": "How log lines look; auto is console on a terminal and json elsewhere.",
            "choices": ("auto", "json", "console"),
        },
    )

    def __post_init__(self) -> None:
        if (self.run_dir is None) == (self.checkpoints is None):
            came = "neither" if self.run_dir is None else "both"
            raise SettingsError(
                f"got {came} of --run-dir and --checkpoints; give the one folder whose checkpoints to serve"
            )
        _check_range("grpc_port", self.grpc_port, low=0, high=_LARGEST_PORT)
        _check_range("http_port", self.http_port, low=0, high=_LARGEST_PORT)
        _check_range("max_message_mib", self.max_message_mib, low=1, high=_LARGEST_MESSAGE_MIB)
        _check_range("stream_depth", self.stream_depth, low=1, high=None)
        _check_range("drain_seconds", self.drain_seconds, low=0, high=None)
        if self.grpc_port == self.http_port != 0:
            raise SettingsError(f"--grpc-port and --http-port are both {self.grpc_port}; give each its own port")

    @property
    def max_message_bytes(self) -> int:
        """The largest message to take or send, in bytes."""
        return self.max_message_mib * 1024 * 1024


def _check_range(name: str, value: float, *, low: float, high: float | None) -> None:
    if value < low or (high is not None and value > high):
        flag = "--" + name.replace("_", "-")
        expected = f"at least {low}" if high is None else f"from {low} to {high}"
        raise SettingsError(f"{flag} is {value}; expected a number {expected}")
