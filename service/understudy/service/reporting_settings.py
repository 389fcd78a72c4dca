"""The settings of what the service reports: the request log, drift, traces, and events."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from understudy.evaluator.evaluation.drift_monitor import DRIFT_FILE, DriftOptions
from understudy.evaluator.records.events import EventType
from understudy.evaluator.records.request_log import RequestLogOptions
from understudy.service.addresses import is_http_url
from understudy.service.events.webhook_settings import destination_name
from understudy.service.service_errors import SettingsError, check_range

_HOUR_SECONDS = 3600
_MOST_FEATURES = 1000
_MOST_DESTINATIONS = 16
_MOST_RETRY_HOURS = 8760


@dataclass(frozen=True, kw_only=True)
class ReportingSettings:
    """What the service reports of requests and checkpoints, and to whom; metrics and the ledger are always on.

    Raises:
        SettingsError: A value is out of range, or is given without the one that it goes with.
    """

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
            "without an input of each of these names is not logged. The service's log then quotes "
            "no values of requests.",
            "metavar": "NAMES",
        },
    )
    request_log_targets: Literal["answers", "classes"] = field(
        default="answers",
        metadata={
            "help": "What an evaluation on the files takes as targets: the answers, or what they decide: the class of "
            "an output with classes, for a loss on class numbers, and which labels hold, 0 or 1, of one with labels.",
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
            "help": "The secrets to sign webhooks with, one a line: whsec_ and 24 to 64 bytes in Base64, after HOST= "
            "if it is for the webhook of that host only. Several while receivers change to another. By default the "
            "variable UNDERSTUDY_WEBHOOK_SECRET.",
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

    def __post_init__(self) -> None:
        self._check_traffic()
        self._check_tracing()
        self._check_events()

    def _check_traffic(self) -> None:
        for name in ("request_log_sample", "drift_sample"):
            if not 0 < getattr(self, name) <= 1:
                raise SettingsError(f"{name} is {getattr(self, name)}; give a share above 0 and up to 1")
        check_range(self, "drift_max_features", low=1, high=_MOST_FEATURES)
        for name in ("request_log_mib", "request_log_hours", "drift_hours"):
            if not getattr(self, name) > 0:
                raise SettingsError(f"{name} is {getattr(self, name)}; give more than 0")
        if self.request_log_redact and self.request_log is None and self.drift_reference is None:
            raise SettingsError("request_log_redact is given without request_log; give the folder too")

    def _check_tracing(self) -> None:
        if self.tracing_sample is not None:
            check_range(self, "tracing_sample", low=0, high=1)
        if self.tracing_endpoint is not None and not is_http_url(self.tracing_endpoint):
            raise SettingsError(
                f"tracing_endpoint is {self.tracing_endpoint!r}; give a URL such as http://collector:4318"
            )
        if not self.tracing and (self.tracing_sample is not None or self.tracing_endpoint is not None):
            raise SettingsError("tracing_endpoint or tracing_sample is given without tracing; give it too")

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
        check_range(self, "event_retry_hours", low=0, high=_MOST_RETRY_HOURS)
        for name in ("webhook_secret_file", "webhook_events"):
            if getattr(self, name) and not self.webhook:
                raise SettingsError(f"{name} is given without webhook; give the URL too")

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
        )

    def drift_options(self, state_dir: Path) -> DriftOptions:
        """Return what is compared with the reference of drift.

        Args:
            state_dir: The evaluator's state folder.
        """
        return DriftOptions(
            file=state_dir / DRIFT_FILE,
            window_seconds=self.drift_hours * _HOUR_SECONDS,
            max_features=self.drift_max_features,
            without=self.request_log_redact,
        )

    @property
    def event_retry_seconds(self) -> float:
        """For how long to try again to deliver an event."""
        return self.event_retry_hours * _HOUR_SECONDS
