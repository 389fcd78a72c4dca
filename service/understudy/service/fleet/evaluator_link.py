"""The connection of a server that follows to its evaluator, through one of several addresses."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import structlog

from understudy.clients.client_errors import (
    DeadlineExceededError,
    NotFoundError,
    UnderstudyError,
    UnimplementedError,
)
from understudy.clients.fleet_calls import FleetCalls, fleet_options
from understudy.clients.tls_files import TlsFileError, read_credentials
from understudy.evaluator.evaluator_errors import AnotherEvaluatorError
from understudy.evaluator.serving.decision_file import ServingDecision, ServingReport, Shadow
from understudy.evaluator.serving.rollout_health import Traffic
from understudy.evaluator.serving.shadow_health import ShadowReport
from understudy.service.fleet.served_traffic import TrafficMeter, encode_shadow, encode_traffic
from understudy.service.service_errors import SettingsError
from understudy.v1 import fleet_pb2

_FIRST_PAUSE_SECONDS: Final = 0.1
_LONGEST_PAUSE_SECONDS: Final = 5.0
_MAX_MESSAGE_BYTES: Final = 2**24
_LEAST_TRAFFIC_SECONDS: Final = 0.05

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class LinkSettings:
    """How the evaluator is called.

    Attributes:
        addresses: ``HOST:PORT``, tried in turn.
        name: The name of this server, in the evaluator's lists.
        model_name: The model that the evaluator must have; empty for any.
        tls_ca: The authorities that sign its certificate; None without TLS.
        tls_cert: The certificate to show; None for none.
        tls_key: The key of that certificate.
        tls_server_name: The name in its certificate; None for that of the address.
        token_file: The file with the token to send; None for none.
        token_without_tls: Whether the token may be sent to other machines without TLS.
    """

    addresses: Sequence[str]
    name: str
    model_name: str
    tls_ca: Path | None
    tls_cert: Path | None
    tls_key: Path | None
    tls_server_name: str | None
    token_file: Path | None
    token_without_tls: bool

    def connect(self, address: str) -> FleetCalls:
        """Return a connection. The files are read each time, as they may have changed.

        Raises:
            SettingsError: A file, a token or an address cannot be used.
        """
        try:
            credentials = None if self.tls_ca is None else read_credentials(self.tls_ca, self.tls_cert, self.tls_key)
            return FleetCalls(
                address,
                model_name=self.model_name,
                credentials=credentials,
                token_file=self.token_file,
                token_without_tls=self.token_without_tls,
                max_message_bytes=_MAX_MESSAGE_BYTES,
                options=fleet_options(self.tls_server_name),
            )
        except TlsFileError as error:
            raise SettingsError(f"follow_tls_{error.role}: {error}") from error
        except ValueError as error:
            raise SettingsError(f"follow: {error}") from error


class GrpcEvaluatorLink:
    """An `understudy.evaluator.serving.following.EvaluatorLink` over gRPC. Thread-safe.

    Args:
        settings: How to call the evaluator.
        software_version: The version of this program.

    Raises:
        SettingsError: A file, a token or an address cannot be used.
    """

    def __init__(self, settings: LinkSettings, *, software_version: str) -> None:
        for address in settings.addresses:
            settings.connect(address).close()
        self._settings = settings
        self._software_version = software_version
        self._lock = threading.Lock()
        self._calls: FleetCalls | None = None
        self._connected = False
        self._problem = "no evaluator has answered yet"
        self._logged: dict[str, str] = {}
        self._refused: dict[str, str] = {}
        self._newest: tuple[str, ServingDecision] | None = None
        self.traffic = TrafficMeter()
        self._report = ServingReport(step=None, digest="", reason="")
        self._reports: _Reports | None = None
        self._shadow: Callable[[], ShadowReport | None] = lambda: None
        self._closing = threading.Event()
        self._on_decision: Callable[[ServingDecision], None] = lambda _: None
        self._thread = threading.Thread(target=self._run, name="understudy-follow")

    def use_shadow(self, shadow: Callable[[], ShadowReport | None]) -> None:
        """Set what returns the report of the version that computes requests once more. It must be quick."""
        self._shadow = shadow

    @property
    def is_connected(self) -> bool:
        """Whether the evaluator answers."""
        return self._connected

    @property
    def problem(self) -> str:
        """See `EvaluatorLink`."""
        return self._problem

    def start(self, on_decision: Callable[[ServingDecision], None]) -> None:
        """See `EvaluatorLink`."""
        self._on_decision = on_decision
        self._thread.start()

    def report(self, report: ServingReport) -> None:
        """See `EvaluatorLink`."""
        self.traffic.serving(report.step, report.digest)
        with self._lock:
            self._report, reports = report, self._reports
        if reports is not None:
            reports.send(report)

    def read(self, decision: ServingDecision, path: str, *, offset: int = 0) -> Iterator[bytes]:
        """See `EvaluatorLink`."""
        with self._lock:
            calls = self._calls
        if calls is None:
            raise ConnectionError(self._problem or "the connection has just ended")
        try:
            yield from calls.read_checkpoint(step=decision.step, digest=decision.digest, path=path, offset=offset)
        except NotFoundError as error:
            raise FileNotFoundError(str(error)) from error
        except UnderstudyError as error:
            raise ConnectionError(str(error)) from error

    def close(self) -> None:
        """See `EvaluatorLink`."""
        self._closing.set()
        self._disconnect()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while not self._closing.is_set():
            for address in self._settings.addresses:
                while not self._closing.is_set() and self._follow(address):
                    pause = _FIRST_PAUSE_SECONDS
                    self._closing.wait(pause)  # then the same address again, which answered a moment ago
            self._closing.wait(pause * random.uniform(0.5, 1.0))  # noqa: S311 - so that servers do not come together
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _follow(self, address: str) -> bool:
        """Follow through an address until that fails; return whether to try it again at once, as it had answered."""
        answered = False
        try:
            reports, calls = self._connect(address)
            for response in calls.follow(iter(reports)):
                reports.send_traffic(response.traffic_seconds)
                if response.HasField("decision"):
                    self._decided(address, _decision(response))
                if not answered:
                    answered = True
                    self._answered(address, response.software_version)
            answered, problem = False, "it has no contact to the evaluator itself"
        except DeadlineExceededError as error:
            if answered:  # the stream's own timeout
                return True
            problem = str(error)
        except UnimplementedError:
            answered = False
            problem = (
                f"the evaluator is of an older version, which no server can follow; run one that is at least as new as "
                f"this server ({self._software_version})"
            )
        except AnotherEvaluatorError as error:
            answered, problem = False, str(error)
            self._refused[address] = f"it follows another evaluator, and found this one: {problem}"
        except (UnderstudyError, SettingsError, ValueError) as error:
            # ValueError: it is behind, or decided for no checkpoint
            answered = answered and isinstance(error, UnderstudyError)
            problem = str(error)
        finally:
            self._disconnect()
        self._problem = f"the evaluator at {address} cannot be followed: {problem}"
        if not self._closing.is_set() and self._problem != self._logged.get(address):
            self._logged[address] = self._problem
            _log.warning(self._problem)
        return answered

    def _decided(self, address: str, decision: ServingDecision) -> None:
        """Pass on a decision, unless another address told a later one of the same evaluator: this one is behind.

        Raises:
            AnotherEvaluatorError: It is another evaluator's.
            ValueError: It is earlier, or names no checkpoint.
        """
        if self._newest is not None:
            last_address, last = self._newest
            is_earlier = decision.evaluator_id == last.evaluator_id and decision.sequence < last.sequence
            if is_earlier and address != last_address:
                raise ValueError(f"it is at decision {decision.sequence}, and {last_address} told {last.sequence}")
        self._on_decision(decision)
        self._newest = address, decision

    def _connect(self, address: str) -> tuple[_Reports, FleetCalls]:
        calls = self._settings.connect(address)
        with self._lock:
            first = fleet_pb2.FollowRequest(
                model_name=self._settings.model_name,
                name=self._settings.name,
                software_version=self._software_version,
            )
            refusal = self._refused.get(address)
            report = self._report if refusal is None else replace(self._report, reason=refusal)
            self._calls, self._reports = calls, _Reports(first, report, self._read_traffic)
            reports = self._reports
        if self._closing.is_set():
            self._disconnect()
        return reports, calls

    def _read_traffic(self, report: ServingReport) -> _Traffic:
        return self.traffic.read(report.step, report.digest), self._shadow()

    def _answered(self, address: str, software_version: str) -> None:
        self._connected, self._problem = True, ""
        self._logged.clear()
        self._refused.pop(address, None)
        with self._lock:
            if self._reports is not None:
                self._reports.send(self._report)
        _log.info("following", address=address, evaluator_version=software_version, own_version=self._software_version)

    def _disconnect(self) -> None:
        self._connected = False
        with self._lock:
            calls, reports = self._calls, self._reports
            self._calls = self._reports = None
        if reports is not None:
            reports.end()
        if calls is not None:
            calls.close()


_Traffic = tuple[Traffic | None, ShadowReport | None]
_NO_TRAFFIC: Final[_Traffic] = (None, None)


class _Reports:
    """An iterator of requests: who follows, then the newest report whenever it changes, or traffic if it is asked for.

    gRPC iterates it on a thread of its own, which ends with it.
    """

    def __init__(
        self,
        first: fleet_pb2.FollowRequest,
        report: ServingReport,
        read: Callable[[ServingReport], _Traffic],
    ) -> None:
        self._read_traffic = read
        self._seconds = 0.0
        self._asked = False
        self._traffic = _NO_TRAFFIC
        self._changed = threading.Condition()
        self._first: fleet_pb2.FollowRequest | None = first
        self._newest = report
        self._sent: ServingReport | None = None
        self._ended = False

    def __iter__(self) -> Iterator[fleet_pb2.FollowRequest]:
        return self

    def __next__(self) -> fleet_pb2.FollowRequest:
        with self._changed:
            while not (self._ended or self._newest != self._sent or self._asked):
                if not self._changed.wait(self._seconds or None) and self._read() != self._traffic:
                    break
            if self._ended:
                raise StopIteration
            report = self._sent = self._newest
            self._asked, self._traffic = False, self._read()
            request, self._first = self._first or fleet_pb2.FollowRequest(), None
            traffic, shadow = self._traffic
            if traffic is not None:
                request.traffic.CopyFrom(encode_traffic(traffic))
            if shadow is not None:
                request.shadow.CopyFrom(encode_shadow(shadow))
        request.serving_digest, request.reason = report.digest, report.reason
        if report.step is not None:
            request.serving_step = report.step
        return request

    def send_traffic(self, seconds: float) -> None:
        """Send traffic now and this often, while there is any; 0 for no more."""
        seconds = max(seconds, _LEAST_TRAFFIC_SECONDS) if seconds > 0 else 0.0
        with self._changed:
            if seconds != self._seconds:
                self._seconds, self._asked = seconds, seconds > 0
                self._changed.notify_all()

    def _read(self) -> _Traffic:
        """Return the traffic of the version of the newest report, if it is asked for."""
        return self._read_traffic(self._newest) if self._seconds else _NO_TRAFFIC

    def send(self, report: ServingReport) -> None:
        with self._changed:
            self._newest = report
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()


def _decision(response: fleet_pb2.FollowResponse) -> ServingDecision:
    message, shadow = response.decision, response.shadow
    return ServingDecision(
        step=message.step,
        digest=message.digest,
        sequence=message.sequence,
        evaluator_id=message.evaluator_id,
        replaces=tuple(message.replaced_evaluator_ids),
        shadow=Shadow(step=shadow.step, digest=shadow.digest, share=shadow.share, tolerance=shadow.tolerance)
        if response.HasField("shadow")
        else None,
    )
