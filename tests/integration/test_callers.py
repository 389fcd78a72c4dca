"""Who may call what, and how much, over real channels, on both front ends and over HTTP."""

from __future__ import annotations

import json
import os
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import grpc
import httpx
import pytest
import structlog
import trustme
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from testkit.certificates import Credentials, replace
from testkit.checkpoints import WIDTH, Chief, ones
from testkit.front_ends import FRONT_ENDS
from testkit.in_process import WAIT_SECONDS, RunningService, running_service, until
from testkit.web_tokens import TokenIssuer
from understudy.service.callers.callers_file import hash_text
from understudy.service.calls.caller import Group
from understudy.v1 import model_pb2, prediction_pb2
from understudy.wire import encode

pytestmark = pytest.mark.long

STEP = 10
SECONDS = 30.0
WATCHED_SECONDS = 0.5
"""How long to watch what does not end."""
OWN, OIP, TFS = "understudy.v1", "inference.GRPCInferenceService", "tensorflow.serving"
PREDICT = f"/{OWN}.PredictionService/Predict"
EVALUATE = f"/{OWN}.EvaluationService/Evaluate"
COMPARE = f"/{OWN}.EvaluationService/Compare"
PROMOTE = f"/{OWN}.ModelService/Promote"
METRICS = f"/{OWN}.MetricsService/GetMetrics"
SERVER_METADATA = f"/{OIP}/ServerMetadata"

NEEDED: Final[Mapping[str, tuple[str, ...]]] = {
    "predict": (
        *(PREDICT, f"/{OWN}.PredictionService/PredictStream"),
        *(f"/{OIP}/ModelInfer", f"/{OIP}/ModelStreamInfer", f"/{TFS}.PredictionService/Predict"),
    ),
    "evaluate": (EVALUATE, COMPARE, f"/{OWN}.EvaluationService/EvaluateDataset", f"/{OWN}.EvaluationService/Replay"),
    "promote": (PROMOTE,),
    "observe": (
        *(METRICS, f"/{OWN}.ModelService/ListCheckpoints", f"/{OIP}/ModelStatistics", f"/{OIP}/RepositoryIndex"),
        *(f"/{OWN}.EvaluationService/ListEvaluations", f"/{OWN}.EvaluationService/WatchEvaluations"),
        *(f"/{OWN}.EvaluationService/GetEvaluationTables", f"/{OWN}.EvaluationService/GetExamples"),
        f"/{OWN}.FleetService/GetFleet",
    ),
    "follow": (f"/{OWN}.FleetService/Follow", f"/{OWN}.FleetService/ReadCheckpoint"),
}
"""The methods that need one group. Every other one but these of `OPEN` needs any group."""
OPEN: Final = (
    *(f"/grpc.health.v1.Health/{name}" for name in ("Check", "List", "Watch")),
    *(f"/{OIP}/{name}" for name in ("ServerLive", "ServerReady")),
)

MEMBERS: Final = {f"only-{group}": (group.value,) for group in Group} | {"nothing": (), "all": tuple(Group)}
"""Callers whose token is their name, and their groups."""

LIMITED: Final = {
    "one-request": "max_requests = 1",
    "one-stream": "max_streams = 1",
    "few-bytes": "max_mib = 0.001",
    "slow": "max_requests_per_second = 0.01",
    "one-evaluation": "max_evaluate_streams = 1\nmax_compare_streams = 1",
}
"""Callers in all groups, each with one limit."""

AuditLines = Callable[[], list[dict[str, Any]]]


def entry(name: str, groups: tuple[str, ...], tokens: tuple[str, ...], more: str = "") -> str:
    hashes = json.dumps([hash_text(token) for token in tokens])
    return f'[[callers]]\nname = "{name}"\ngroups = {json.dumps(groups)}\ntokens = {hashes}\n{more}\n'


@dataclass
class Site:
    """A service with mutual TLS and a file of callers, and who calls it."""

    service: RunningService
    folder: Path
    authority: trustme.CA
    issuer: TokenIssuer
    unknown: Credentials
    known: Credentials
    stack: ExitStack
    channels: dict[str, grpc.Channel] = field(default_factory=dict)

    def write(self, *rotated: str) -> None:
        replace(self.folder / "callers.toml", self.text(self.folder, *rotated).encode())

    @staticmethod
    def text(folder: Path, *rotated: str) -> str:
        return "\n".join(
            [
                *(entry(name, groups, (name,)) for name, groups in MEMBERS.items()),
                *(entry(name, tuple(Group), (name,), f"[callers.limits]\n{text}") for name, text in LIMITED.items()),
                entry("rotated", ("predict",), rotated or ("none",)),
                entry("robot", ("predict", "observe"), ("robot",), 'certificates = ["robot.example.com"]'),
                '[[issuers]]\nname = "corp"\nissuer = "https://login.example.com"\naudience = "understudy"',
                f'jwks = "{folder / "keys.json"}"\ngroups_claim = "roles"\ngroups = {{ "ml admins" = ["promote"] }}',
            ]
        )

    def channel(self, credentials: Credentials | None = None) -> Any:
        """Return a channel whose calls send and return bytes."""
        shown = credentials or self.unknown
        if shown.certificate.as_posix() not in self.channels:
            options = [("grpc.enable_retries", 0)]
            channel = grpc.secure_channel(self.service.grpc, shown.channel(), options)
            self.channels[shown.certificate.as_posix()] = self.stack.enter_context(closing(channel))
        return self.channels[shown.certificate.as_posix()]

    def call(
        self,
        path: str,
        token: str | None,
        *requests: bytes,
        credentials: Credentials | None = None,
        metadata: tuple[tuple[str, str], ...] = (),
        seconds: float = SECONDS,
    ) -> Any:
        """Start a call of any method; return it."""
        method = self.channel(credentials).stream_stream(path)
        with_token = metadata if token is None else (*metadata, ("authorization", f"Bearer {token}"))
        return method(iter(requests or (b"",)), metadata=with_token, timeout=seconds)

    def outcome(self, path: str, token: str | None, *requests: bytes, **more: Any) -> tuple[grpc.StatusCode, str]:
        """Return the status of a call."""
        call = self.call(path, token, *requests, **more)
        try:
            for _ in call:
                pass
        except grpc.RpcError:
            return call.code(), call.details()
        return call.code(), call.details()

    def http(
        self, token: str | None = None, credentials: Credentials | None = None, *, address: str = "127.0.0.1"
    ) -> httpx.Client:
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        transport = httpx.HTTPTransport(verify=(credentials or self.unknown).context(), local_address=address)
        return self.stack.enter_context(
            httpx.Client(base_url=f"https://{self.service.http}", headers=headers, transport=transport, timeout=SECONDS)
        )


@pytest.fixture(scope="module", params=FRONT_ENDS)
def site(
    request: pytest.FixtureRequest, replicas: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("callers")
    Chief(folder / "run").publish(STEP)
    authority, issuer = trustme.CA(), TokenIssuer()
    server = Credentials(folder / "server", authority, "127.0.0.1")
    issuer.publish(folder / "keys.json")
    (folder / "callers.toml").write_text(Site.text(folder), encoding="utf-8")
    settings = {
        "run_dir": folder / "run",
        "tls_cert": server.certificate,
        "tls_key": server.key,
        "tls_client_ca": server.ca,
        "callers": folder / "callers.toml",
        "log_level": "error",
        "log_format": "json",
    }
    with ExitStack() as stack:
        with inherited_stderr(folder / "stderr"):
            service = stack.enter_context(
                running_service(settings, {}, replicas=replicas, state_dir=folder / "state", front_end=request.param)
            )
        service.wait_ready()
        yield Site(
            service,
            folder,
            authority,
            issuer,
            Credentials(folder / "unknown", authority, "unknown.example.com"),
            Credentials(folder / "known", authority, "known.example.com", "robot.example.com"),
            stack,
        )


@pytest.fixture(scope="module")
def paths(site: Site) -> tuple[str, ...]:
    """Every method that the server serves."""
    families = text_string_to_metric_families(site.http("all").get("/metrics").text)
    (started,) = [family for family in families if family.name == "grpc_server_started"]
    labels = [sample.labels for sample in started.samples]
    return tuple(f"/{each['grpc_service']}/{each['grpc_method']}" for each in labels)


@pytest.fixture
def audit_lines(site: Site) -> Iterator[AuditLines]:
    """Return the audit lines since the test began, of a server in this process or in another."""
    file = site.folder / "stderr"
    before = file.stat().st_size
    with structlog.testing.capture_logs() as here:

        def so_far() -> list[dict[str, Any]]:
            written = file.read_bytes()[before:].decode().splitlines()
            there = [json.loads(line) for line in written if line.startswith("{") and line.endswith("}")]
            return [dict(line) for line in [*here, *there] if "outcome" in line]

        yield so_far


@contextmanager
def inherited_stderr(file: Path) -> Iterator[None]:
    """Let processes that the block starts write to a file."""
    kept = os.dup(2)
    try:
        with file.open("wb") as opened:
            os.dup2(opened.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def predict_request() -> bytes:
    inputs = {"x": encode(ones(1))}
    return bytes(prediction_pb2.PredictRequest(inputs=inputs).SerializeToString())


def groups_for(path: str) -> set[str]:
    """Return the groups of which a method's callers need one; none if it is open."""
    if path in OPEN:
        return set()
    return {group for group, needing in NEEDED.items() if path in needing} or {group.value for group in Group}


def seconds_for(path: str, *, ends: bool) -> float:
    """Return how long to wait for the end of a call; a refusal may take long on a busy machine."""
    return SECONDS if ends or not path.endswith(("/Watch", "/WatchEvaluations")) else WATCHED_SECONDS


def test_each_group_reaches_its_methods_and_no_other(site: Site, paths: tuple[str, ...]) -> None:
    assert len(paths) > 40
    assert {path for needing in NEEDED.values() for path in needing} <= set(paths)
    for path in paths:
        needed = groups_for(path)
        for name, groups in MEMBERS.items():
            may_call = not needed or bool(needed & set(groups))
            code, details = site.outcome(path, name, seconds=seconds_for(path, ends=not may_call))
            if may_call:
                assert code not in {grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED}, (path, name)
            else:
                assert code is grpc.StatusCode.PERMISSION_DENIED, (path, name)
                assert name in details
                assert all(group in details for group in needed)


def test_a_caller_without_a_name_reaches_health_only(site: Site, paths: tuple[str, ...]) -> None:
    for path in paths:
        code, details = site.outcome(path, None, seconds=seconds_for(path, ends=path not in OPEN))
        if path in OPEN:
            assert code not in {grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED}, path
        else:
            assert code is grpc.StatusCode.UNAUTHENTICATED, path
            assert "unknown.example.com" in details


def test_no_bytes_get_a_caller_without_the_group_further(site: Site, paths: tuple[str, ...]) -> None:
    shut = [path for path in paths if path not in OPEN]

    @settings(max_examples=60, suppress_health_check=list(HealthCheck))
    @given(
        st.sampled_from(shut),
        st.sampled_from(sorted(MEMBERS)),
        st.lists(st.binary(max_size=64), min_size=1, max_size=2),
    )
    def check(path: str, name: str, requests: list[bytes]) -> None:
        if not groups_for(path) & set(MEMBERS[name]):
            assert site.outcome(path, name, *requests)[0] is grpc.StatusCode.PERMISSION_DENIED

    check()


def test_a_wrong_token_is_refused_even_with_a_known_certificate(site: Site, audit_lines: AuditLines) -> None:
    secret = f"understudy_{len(MEMBERS)}not-known"
    code, details = site.outcome(PREDICT, secret, credentials=site.known)
    assert code is grpc.StatusCode.UNAUTHENTICATED
    response = site.http(secret, site.known).get("/metrics")
    assert (response.status_code, response.headers["www-authenticate"]) == (401, 'Bearer realm="understudy"')
    until(lambda: len(audit_lines()) >= 2)
    for line in audit_lines():
        assert (line["caller"], line["outcome"]) == ("", "UNAUTHENTICATED")
        assert "robot.example.com" in line["certificate"]
        assert "127.0.0.1:" in line["peer"]
    assert secret not in details + response.text + json.dumps(audit_lines())


def test_a_call_with_two_tokens_is_refused_whatever_they_are(site: Site) -> None:
    for first, second in (("only-predict", "only-observe"), ("all", "all"), ("all", "unknown"), ("unknown", "all")):
        tokens = tuple(("authorization", f"Bearer {token}") for token in (first, second))
        for path in (PREDICT, METRICS):
            code, details = site.outcome(path, None, predict_request(), metadata=tokens)
            assert code is grpc.StatusCode.UNAUTHENTICATED, (path, first, second, details)
        for path in ("/metrics", "/v2", "/"):
            response = site.http().get(path, headers=list(tokens))
            assert response.status_code == 401, (path, first, second)
    assert "more than one header authorization" in response.text


def test_a_certificate_names_its_caller_on_every_port(site: Site) -> None:
    assert site.outcome(PREDICT, None, predict_request(), credentials=site.known)[0] is grpc.StatusCode.OK
    code, details = site.outcome(PROMOTE, None, credentials=site.known)
    assert (code, "robot may not call Promote" in details) == (grpc.StatusCode.PERMISSION_DENIED, True)
    http = site.http(credentials=site.known)
    assert http.get("/metrics").status_code == 200
    assert http.get("/v2/models/model").status_code == 200


def test_a_caller_cannot_say_which_certificate_it_has(site: Site) -> None:
    forged = f'Hash=0;Cert="{site.known.certificate.read_text(encoding="ascii")}"'.replace("\n", "%0A")
    metadata = (("x-forwarded-client-cert", forged),)
    assert site.outcome(SERVER_METADATA, None, metadata=metadata)[0] is grpc.StatusCode.UNAUTHENTICATED
    headers = {"x-forwarded-client-cert": forged}
    assert site.http().get("/v2", headers=headers).status_code == 401


def test_a_web_token_names_its_caller(site: Site, audit_lines: AuditLines) -> None:
    token = site.issuer.token("grace", roles=["ml admins"])
    code, details = site.outcome(PREDICT, token, predict_request())
    assert (code, details) == (
        grpc.StatusCode.PERMISSION_DENIED,
        "corp/grace may not call Predict, as it is not in the group predict; ask the operator for it",
    )
    assert site.outcome(PROMOTE, token)[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert site.http(token).get("/v2").status_code == 200
    until(lambda: len(audit_lines()) >= 2)
    assert {(line["caller"], line["event"], line["outcome"]) for line in audit_lines()} == {
        ("corp/grace", "caller refused", "PERMISSION_DENIED"),
        ("corp/grace", "serving version requested", "INVALID_ARGUMENT"),
    }


def test_a_promotion_is_audited_with_its_caller(site: Site, audit_lines: AuditLines) -> None:
    unpin = model_pb2.PromoteRequest(action=model_pb2.PROMOTE_ACTION_UNPIN).SerializeToString()
    assert site.outcome(PROMOTE, "only-promote", unpin)[0] is grpc.StatusCode.OK
    until(lambda: len(audit_lines()) >= 1)
    (line,) = audit_lines()
    assert (line["event"], line["action"], line["outcome"]) == ("serving version requested", "unpin", "OK")
    assert (line["caller"], line["certificate"]) == ("only-promote", "unknown.example.com")
    assert "127.0.0.1:" in line["peer"]


def test_rest_and_metrics_refuse_as_grpc_does(site: Site, audit_lines: AuditLines) -> None:
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, WIDTH], "data": [1.0] * WIDTH}]}
    infer = "/v2/models/model/infer"
    anonymous, nothing, predicts, observes = (
        site.http(name, address="127.0.0.2")  # the refusals of each host are limited apart
        for name in (None, "nothing", "only-predict", "only-observe")
    )
    for path in ("/metrics", "/v2", "/v2/models/model", "/v2/models/stats", "/v2/models/model/ready"):
        response = anonymous.get(path)
        assert (response.status_code, response.headers["www-authenticate"]) == (401, 'Bearer realm="understudy"')
        assert nothing.get(path).status_code == 403
    assert anonymous.post(infer, json=body).status_code == 401
    assert predicts.post(infer, json=body).status_code == 200
    for refused in (observes.post(infer, json=body), predicts.get("/metrics"), predicts.get("/v2/models/stats")):
        assert refused.status_code == 403
        assert "as it is not in the group" in refused.json()["error"]
    assert observes.get("/metrics").status_code == 200
    for path in ("/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"):
        assert anonymous.get(path).status_code == 200
    until(lambda: len(audit_lines()) >= 14)
    assert {line["event"] for line in audit_lines()} == {"caller refused"}


def test_a_request_without_a_certificate_leaves_an_audit_line(site: Site, audit_lines: AuditLines) -> None:
    context = ssl.create_default_context(cafile=site.unknown.ca)
    assert httpx.get(f"https://{site.service.http}/metrics", verify=context).status_code == 403
    until(lambda: len(audit_lines()) == 1)
    (line,) = audit_lines()
    assert (line["event"], line["path"], line["outcome"]) == ("caller refused", "/metrics", "PERMISSION_DENIED")
    assert "127.0.0.1:" in line["peer"]


def retry_seconds(call: Any) -> float:
    """Return the delay in the RetryInfo of a call that failed for want of resources."""
    with pytest.raises(grpc.RpcError):
        for _ in call:
            pass
    assert call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, call.details()
    status, retry = Status.FromString(dict(call.trailing_metadata())["grpc-status-details-bin"]), RetryInfo()
    assert status.details[0].Unpack(retry)
    return float(retry.retry_delay.ToTimedelta().total_seconds())


class Held:
    """A stream of a caller that sends nothing."""

    def __init__(self, site: Site, path: str, token: str) -> None:
        self._end = threading.Event()
        method = site.channel().stream_unary(path)

        def requests() -> Iterator[bytes]:
            self._end.wait(WAIT_SECONDS)
            yield from ()

        self._future = method.future(requests(), metadata=(("authorization", f"Bearer {token}"),), timeout=SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._future.cancel()


def open_streams(site: Site, path: str) -> float:
    service, method = path.removeprefix("/").split("/")
    families = text_string_to_metric_families(site.http("all").get("/metrics").text)
    samples = [sample for family in families for sample in family.samples if sample.labels.get("grpc_method") == method]
    counts = [sample for sample in samples if sample.labels["grpc_service"] == service]
    started = sum(sample.value for sample in counts if sample.name == "grpc_server_started_total")
    return started - sum(sample.value for sample in counts if sample.name == "grpc_server_handled_total")


@pytest.mark.parametrize(
    ("name", "path"), [("one-stream", EVALUATE), ("one-evaluation", EVALUATE), ("one-evaluation", COMPARE)]
)
def test_one_caller_cannot_hold_every_stream(site: Site, name: str, path: str) -> None:
    until(lambda: open_streams(site, path) == 0)
    with Held(site, path, name):
        until(lambda: open_streams(site, path) == 1)
        assert retry_seconds(site.call(path, name)) > 0
        with Held(site, path, "all"):
            until(lambda: open_streams(site, path) == 2)
    until(lambda: open_streams(site, path) == 0)
    assert site.outcome(path, name)[0] is grpc.StatusCode.INVALID_ARGUMENT  # an empty message


def test_a_callers_bytes_and_rate_are_limited(site: Site) -> None:
    code, details = site.outcome(PREDICT, "few-bytes", bytes(2000))
    assert (code, "may have 1048 under way (max_mib)" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    assert site.outcome(PREDICT, "few-bytes", predict_request())[0] is grpc.StatusCode.OK

    unfinished = iter([bytes(800), bytes(800), bytes(800)])
    response = site.http("few-bytes").post("/v2/models/model/infer", content=unfinished)
    assert (response.status_code, "1048 under way (max_mib)" in response.json()["error"]) == (400, True)

    assert site.outcome(PREDICT, "slow", predict_request())[0] is grpc.StatusCode.OK
    assert 50 < retry_seconds(site.call(PREDICT, "slow", predict_request())) <= 100
    response = site.http("slow").get("/v2")
    assert response.status_code == 429
    assert 50 < int(response.headers["retry-after"]) <= 100
    assert "understudy_refused_calls_total" in site.http("all").get("/metrics").text


@dataclass
class Load:
    """Calls one after the other, with the newest token of a caller."""

    site: Site
    token: str
    answered: int = 0
    failures: list[str] = field(default_factory=list)

    def run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            code, details = self.site.outcome(PREDICT, self.token, predict_request())
            if code is grpc.StatusCode.OK:
                self.answered += 1
            else:
                self.failures.append(f"{code} {details}")


def test_a_token_is_replaced_under_load_without_a_failed_call(site: Site) -> None:
    def is_known(token: str) -> bool:
        return site.outcome(SERVER_METADATA, token)[0] is grpc.StatusCode.OK

    tokens = ("first", "second")
    site.write("first")
    until(lambda: is_known("first"))
    load, stop = Load(site, "first"), threading.Event()
    thread = threading.Thread(target=load.run, args=(stop,))
    thread.start()
    try:
        until(lambda: load.answered > 0)
        site.write("first", "second")
        until(lambda: is_known("second"))
        load.token = tokens[1]
        before = load.answered
        until(lambda: load.answered > before + 1 or bool(load.failures))
        site.write("second")
        until(lambda: not is_known("first"))
        before = load.answered
        until(lambda: load.answered > before + 5 or bool(load.failures))
    finally:
        stop.set()
        thread.join(WAIT_SECONDS)
    assert load.failures == []
