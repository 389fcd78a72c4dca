"""The settings of the service."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from understudy.evaluator.settings import FOLLOW, CheckpointLocation, addresses_of
from understudy.service.fleet.evaluator_link import LinkSettings
from understudy.service.listening_settings import ListeningSettings
from understudy.service.reporting_settings import ReportingSettings
from understudy.service.service_errors import SettingsError, check_range

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "json", "console"]


@dataclass(frozen=True, kw_only=True)
class ServingSettings:
    """What is served, and who decides it.

    Raises:
        SettingsError: It is not clear which checkpoints to serve, or a setting is given without the one that it goes
            with.
    """

    run_dir: Path | None = field(
        default=None,
        metadata={
            "help": "The run folder a trainer publishes its checkpoints to, or the URL that understudy publish copies "
            "them to (s3://...).",
            "metavar": "RUN",
            "url": True,
        },
    )
    checkpoints: Path | None = field(
        default=None,
        metadata={
            "help": "A folder of checkpoints that another program writes, in any format of Keras and TensorFlow, or "
            "its URL (s3://..., gs://...); instead of --run-dir.",
            "metavar": "DIR",
            "url": True,
        },
    )
    experiment: str | None = field(
        default=None,
        metadata={
            "help": "The experiment whose datasets to score, and which builds the model of checkpoints that hold "
            "variables alone: a bundled name, package.module:object or file.py:object.",
            "metavar": "EXPERIMENT",
        },
    )
    eval_data: Mapping[str, Path] = field(
        default_factory=dict,
        metadata={
            "help": "Datasets to score, each an .npz file, TFRecord files or a saved tf.data folder, under a name.",
            "metavar": "NAME=PATH",
        },
    )
    state_dir: Path | None = field(
        default=None,
        metadata={
            "help": "The folder of the ledger, the results and the leased checkpoints; by default RUN/evaluator, or "
            "for --checkpoints and for URLs a folder under $XDG_STATE_HOME/understudy.",
            "metavar": "DIR",
        },
    )
    model_name: str | None = field(
        default=None,
        metadata={
            "help": "The name the model is served under; by default the experiment's, else 'model'.",
            "metavar": "NAME",
        },
    )
    read_only: bool = field(
        default=False,
        metadata={
            "help": "Refuse Promote, the call that changes what is served. EvaluateDataset scores "
            "without an entry in the ledger."
        },
    )
    follow: str | None = field(default=None, metadata=FOLLOW)
    follow_name: str | None = field(
        default=None,
        metadata={
            "help": "With --follow HOST:PORT, the name of this server in the evaluator's lists; by default the name of "
            "the machine and the gRPC port.",
            "metavar": "NAME",
        },
    )
    follow_tls_ca: Path | None = field(
        default=None,
        metadata={
            "help": "Call the evaluator to follow over TLS; the authorities that sign its certificate, in PEM.",
            "metavar": "FILE",
        },
    )
    follow_tls_cert: Path | None = field(
        default=None,
        metadata={
            "help": "With --follow-tls-ca, the certificate to show to the evaluator, in PEM.",
            "metavar": "FILE",
        },
    )
    follow_tls_key: Path | None = field(
        default=None,
        metadata={"help": "The private key of --follow-tls-cert, unencrypted, in PEM.", "metavar": "FILE"},
    )
    follow_tls_server_name: str | None = field(
        default=None,
        metadata={
            "help": "With --follow-tls-ca, the name in the evaluator's certificate, if --follow has another.",
            "metavar": "NAME",
        },
    )
    follow_token_file: Path | None = field(
        default=None,
        metadata={
            "help": "The file that holds the bearer token to send to the evaluator to follow, of the group follow; "
            "read again when it changes.",
            "metavar": "FILE",
        },
    )
    follow_token_without_tls: bool = field(
        default=False,
        metadata={
            "help": "Send the token also without --follow-tls-ca to other machines; where a proxy or a service mesh "
            "has TLS."
        },
    )
    standby: bool = field(
        default=False,
        metadata={
            "help": "While another evaluator uses the state folder, wait instead of ending: answer that this server is "
            "not ready, and take over when the other one ends or dies."
        },
    )

    def __post_init__(self) -> None:
        self._check_follow()
        is_given = self.run_dir is not None or self.checkpoints is not None
        if (self.run_dir is None) == (self.checkpoints is None) and (is_given or not addresses_of(self.follow)):
            came = "neither" if self.run_dir is None else "both"
            raise SettingsError(
                f"got {came} of --run-dir and --checkpoints; give the folder whose checkpoints to serve"
            )

    def _check_follow(self) -> None:
        if self.standby and self.follow is not None:
            raise SettingsError("standby goes without follow, with which this server has a state folder of its own")
        names = ("tls_ca", "tls_cert", "tls_key", "tls_server_name", "token_file", "name")
        given = [name for name in names if getattr(self, f"follow_{name}") is not None]
        if given and not addresses_of(self.follow):
            raise SettingsError(f"follow_{given[0]} goes with follow HOST:PORT, which it is for")
        if self.follow_tls_ca is None and (needing := [name for name in given if name in names[1:4]]):
            raise SettingsError(f"follow_{needing[0]} goes with follow_tls_ca; give the authorities to trust too")
        if (self.follow_tls_cert is None) != (self.follow_tls_key is None):
            raise SettingsError("follow_tls_cert and follow_tls_key go together; give both, or neither")

    def link(self, grpc_port: int) -> LinkSettings | None:
        """Return how to call the evaluator to follow; None if there is none, or if its folder is read.

        Args:
            grpc_port: The port of this server.
        """
        addresses = addresses_of(self.follow)
        if not addresses:
            return None
        return LinkSettings(
            addresses=addresses,
            name=self.follow_name or f"{socket.gethostname()}:{grpc_port}",
            model_name=self.model_name or "",
            tls_ca=self.follow_tls_ca,
            tls_cert=self.follow_tls_cert,
            tls_key=self.follow_tls_key,
            tls_server_name=self.follow_tls_server_name,
            token_file=self.follow_token_file,
            token_without_tls=self.follow_token_without_tls,
        )


@dataclass(frozen=True, kw_only=True)
class ServeSettings(ReportingSettings, ListeningSettings, ServingSettings):
    """The settings of the service; those of the evaluator are `understudy.evaluator.settings.EvaluatorSettings`.

    The fields of the last base class come first.

    Raises:
        SettingsError: A value is out of range, or it is not clear which checkpoints to serve.
    """

    drain_seconds: float = field(
        default=30.0,
        metadata={"help": "How long calls under way may take to finish after SIGTERM.", "metavar": "SECONDS"},
    )
    exit_when_finished: bool = field(
        default=False,
        metadata={"help": "End when training has ended and all its checkpoints are evaluated; with --run-dir."},
    )
    exit_timeout_seconds: float = field(
        default=3600.0,
        metadata={
            "help": "With --exit-when-finished, how long to wait for training to begin, or to begin again after what "
            "a start again mends, and between evaluations once it has ended.",
            "metavar": "SECONDS",
        },
    )
    log_level: LogLevel = field(
        default="info",
        metadata={"help": "The lowest level of log lines to write.", "choices": ("debug", "info", "warning", "error")},
    )
    log_format: LogFormat = field(
        default="auto",
        metadata={
            "help": "The format of log lines; auto is console on a terminal and json elsewhere.",
            "choices": ("auto", "json", "console"),
        },
    )

    def __post_init__(self) -> None:
        ServingSettings.__post_init__(self)
        ListeningSettings.__post_init__(self)
        ReportingSettings.__post_init__(self)
        check_range(self, "drain_seconds", low=0)
        check_range(self, "exit_timeout_seconds", low=0)
        if self.exit_when_finished and self.run_dir is None:
            raise SettingsError("exit_when_finished goes with --run-dir, whose training.json says how training ends")

    @property
    def location(self) -> CheckpointLocation:
        """The source of the checkpoints and of the datasets to score."""
        folder = self.run_dir or self.checkpoints or self.evaluator_state_dir
        is_run = self.checkpoints is None
        return CheckpointLocation(folder=folder, is_run=is_run, experiment=self.experiment, eval_data=self.eval_data)

    @property
    def journal_folder(self) -> Path | None:
        """The local folder that holds the journal of the training; None without a run folder."""
        return None if self.run_dir is None else self.location.local_folder(self.evaluator_state_dir)

    @property
    def evaluator_state_dir(self) -> Path:
        """The evaluator's state folder: the same folder for the same checkpoints.

        Raises:
            SettingsError: None is given, and this user has no home folder.
        """
        if self.state_dir is not None:
            return self.state_dir
        folder = self.run_dir or self.checkpoints
        if folder is None:
            digest = hashlib.sha256(f"{self.follow} {self.grpc_port}".encode()).hexdigest()
            return _state_home() / f"following-{digest[:12]}"
        is_url = self.location.url is not None
        if self.run_dir is not None and not is_url:
            return self.run_dir / "evaluator"
        folder = folder if is_url else folder.resolve()
        return _state_home() / f"{folder.name}-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]}"


def _state_home() -> Path:
    """Return the folder for the state of all servers of this user that have no run folder."""
    chosen = os.environ.get("XDG_STATE_HOME")
    try:
        return Path(chosen or Path.home() / ".local" / "state") / "understudy"
    except RuntimeError as error:
        raise SettingsError("state_dir is not given, and this user has no home folder; give --state-dir") from error
