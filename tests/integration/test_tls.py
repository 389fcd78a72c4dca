"""TLS with client certificates on every port of a service."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import grpc
import httpx
import pytest
import trustme
from click.testing import CliRunner

from testkit.certificates import Credentials, certificate_of, handshake, replace
from testkit.checkpoints import Chief, ones
from testkit.front_ends import FRONT_ENDS
from testkit.in_process import WAIT_SECONDS, RunningService, running_service, until
from testkit.prometheus_tools import scraping, value_of
from understudy.cli.main import main
from understudy.clients import AsyncClient, Client, UnavailableError

pytestmark = pytest.mark.long

STEP = 10
AT_ONCE: Final[dict[str, Any]] = {"options": [("grpc.enable_retries", 0)], "timeout_seconds": WAIT_SECONDS}
"""The arguments of a client that reports the first failure."""

SEVERAL = 24
"""More connections than grpcio has servers; the kernel spreads them over the servers."""

BOTH_PORTS = pytest.mark.parametrize("port", ["grpc", "http"])


@dataclass
class Site:
    """A service that requires certificates, and those of a caller."""

    service: RunningService
    authority: trustme.CA
    server: Credentials
    caller: Credentials
    address_file: Path

    def address(self, port: str) -> str:
        return self.service.grpc if port == "grpc" else self.service.http

    def shown(self, port: str = "grpc") -> bytes:
        """Return the certificate that a new connection sees."""
        return certificate_of(self.address(port), self.caller.context())


@pytest.fixture(scope="module", params=FRONT_ENDS)
def site(
    request: pytest.FixtureRequest, replicas: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("tls")
    Chief(folder / "run").publish(STEP)
    authority = trustme.CA()
    server = Credentials(folder / "server", authority, "127.0.0.1")
    replace(server.ca, b"# Zertifizierungsstelle f\xfcr Anrufer\n" + server.ca.read_bytes())  # as bundles have it
    caller = Credentials(folder / "caller", authority, "caller")
    settings = {
        "run_dir": folder / "run",
        "tls_cert": server.certificate,
        "tls_key": server.key,
        "tls_client_ca": server.ca,
        "address_file": folder / "address",
    }
    with running_service(
        settings, {}, replicas=replicas, state_dir=folder / "state", front_end=request.param
    ) as service:
        service.wait_ready()
        yield Site(service, authority, server, caller, folder / "address")


def client_of(site: Site, credentials: grpc.ChannelCredentials | None) -> Client:
    return site.service.client(credentials=credentials, **AT_ONCE)


async def test_both_clients_and_health_checks_call_over_tls(site: Site) -> None:
    client = client_of(site, site.caller.channel())
    assert client.predict(ones(3)).step == STEP
    assert client.is_serving()
    async with AsyncClient(site.service.grpc, credentials=site.caller.channel()) as asynchronous:
        assert (await asynchronous.predict(ones(2))).step == STEP
        assert await asynchronous.is_serving()


def test_the_command_line_asks_over_tls(site: Site) -> None:
    tls = {"TLS_CA": site.caller.ca, "TLS_CERT": site.caller.certificate, "TLS_KEY": site.caller.key}
    env = {f"UNDERSTUDY_{name}": str(file) for name, file in tls.items()} | {"UNDERSTUDY_TARGET": site.service.grpc}

    asked = CliRunner().invoke(main, ["status", "--json"], env=env)

    assert asked.exit_code == 0, asked.stderr
    assert json.loads(asked.stdout)["serving_step"] == STEP


def test_health_finds_and_asks_the_server_of_its_container(site: Site) -> None:
    """There, the variables of the service's own certificate are set, and none of a client's."""
    env = {
        "UNDERSTUDY_ADDRESS_FILE": str(site.address_file),
        "UNDERSTUDY_TLS_CERT": str(site.server.certificate),
        "UNDERSTUDY_TLS_KEY": str(site.server.key),
        "UNDERSTUDY_TLS_CLIENT_CA": str(site.server.ca),
    }
    asked = CliRunner().invoke(main, ["health"], env=env)
    assert (asked.exit_code, asked.stdout) == (0, "SERVING\n"), asked.stderr
    one_service = CliRunner().invoke(main, ["health", "--service", "understudy.v1.PredictionService"], env=env)
    assert one_service.exit_code == 2
    assert "go with --tls-ca" in one_service.stderr


def test_a_caller_without_tls_is_refused(site: Site) -> None:
    with pytest.raises(UnavailableError):
        client_of(site, None).predict(ones(1))
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://{site.service.http}/healthz")


def test_a_caller_without_a_certificate_is_refused(site: Site) -> None:
    with pytest.raises(UnavailableError):
        client_of(site, grpc.ssl_channel_credentials(site.caller.ca.read_bytes())).predict(ones(1))


def test_a_caller_with_a_certificate_of_another_authority_is_refused(site: Site, tmp_path: Path) -> None:
    unknown = Credentials(tmp_path, trustme.CA(), "caller")
    replace(unknown.ca, site.caller.ca.read_bytes())
    with pytest.raises(UnavailableError):
        client_of(site, unknown.channel()).predict(ones(1))
    with pytest.raises(httpx.TransportError):
        httpx.get(f"https://{site.service.http}/metrics", verify=unknown.context())


def test_a_server_of_an_unknown_authority_is_not_called(site: Site, tmp_path: Path) -> None:
    deceived = Credentials(tmp_path, site.authority, "caller")
    replace(deceived.ca, trustme.CA().cert_pem.bytes())
    with pytest.raises(UnavailableError):
        client_of(site, deceived.channel()).predict(ones(1))
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"https://{site.service.http}/healthz", verify=deceived.context())


@BOTH_PORTS
def test_tls_1_2_and_1_3_are_spoken_and_1_1_is_not(site: Site, port: str) -> None:
    for version, name in ((ssl.TLSVersion.TLSv1_2, "TLSv1.2"), (ssl.TLSVersion.TLSv1_3, "TLSv1.3")):
        context = site.caller.context()
        context.minimum_version = context.maximum_version = version
        with handshake(site.address(port), context) as connection:
            assert connection.version() == name
            assert connection.selected_alpn_protocol() == ("h2" if port == "grpc" else None)
    old = site.caller.context()
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(ssl.SSLError, match=r"PROTOCOL_VERSION|EOF"), handshake(site.address(port), old):
        pass


def test_probes_need_no_certificate_and_all_else_over_http_does(site: Site) -> None:
    url = f"https://{site.service.http}"
    without = ssl.create_default_context(cafile=site.caller.ca)
    with (
        httpx.Client(base_url=url, verify=without) as anybody,
        httpx.Client(base_url=url, verify=site.caller.context()) as caller,
    ):
        assert [anybody.get(path).status_code for path in ("/healthz", "/readyz")] == [200, 200]
        for path in ("/metrics", "/v2/models/model", "/v2/health/ready", "/healthz/../metrics"):
            refused = anybody.get(path)
            assert refused.status_code == 403
            assert "needs a client certificate" in refused.json()["error"]
        assert "understudy_serving_step 10.0" in caller.get("/metrics").text
        assert caller.get("/v2/health/ready").status_code == 200


def test_a_real_prometheus_scrapes_over_https_with_its_certificate(site: Site, tmp_path: Path) -> None:
    own = {"ca_file": site.caller.ca, "cert_file": site.caller.certificate, "key_file": site.caller.key}
    tls = {name: str(file) for name, file in own.items()}
    with scraping(site.service.http, tmp_path, scheme="https", tls_config=tls) as prometheus:
        until(lambda: value_of(prometheus, "understudy_serving_step") == STEP)


@dataclass
class Calls:
    """A loop of calls: one after the other on one channel, and each now and then on a new one."""

    site: Site
    answered: int = 0
    failures: list[Exception] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(WAIT_SECONDS)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        kept = client_of(self.site, self.site.caller.channel())
        try:
            while not self._stop.is_set():
                kept.predict(ones(1))
                with Client(self.site.service.grpc, credentials=self.site.caller.channel(), **AT_ONCE) as fresh:
                    fresh.predict(ones(1))
                self.answered += 2
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.failures.append(error)


def test_a_new_certificate_is_used_for_new_connections_and_no_call_fails(site: Site) -> None:
    with Calls(site) as calls:
        until(lambda: calls.answered > 0)
        renewed = site.server.renew(site.authority)
        until(lambda: site.shown("grpc") == site.shown("http") == renewed)
        assert {site.shown("grpc") for _ in range(SEVERAL)} == {renewed}
        before = calls.answered
        until(lambda: bool(calls.failures) or calls.answered > before + 10)
    assert calls.failures == []


def test_a_new_authority_of_clients_is_accepted_and_the_old_one_no_longer(site: Site, tmp_path: Path) -> None:
    successor = trustme.CA()
    new = Credentials(tmp_path, successor, "caller")
    replace(new.ca, site.caller.ca.read_bytes())

    def is_accepted(caller: Credentials) -> bool:
        with Client(site.service.grpc, credentials=caller.channel(), **AT_ONCE) as client:
            try:
                client.status()
            except UnavailableError:
                return False
        with httpx.Client(verify=caller.context()) as http:
            try:
                return http.get(f"https://{site.service.http}/metrics").status_code == 200
            except httpx.TransportError:
                return False

    before = site.server.ca.read_bytes()
    try:
        replace(site.server.ca, successor.cert_pem.bytes())
        until(lambda: is_accepted(new))
        assert not is_accepted(site.caller)
    finally:
        replace(site.server.ca, before)
        until(lambda: is_accepted(site.caller))
