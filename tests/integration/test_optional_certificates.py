"""Client certificates that callers may have, beside tokens: on the front end that can ask for them, and over HTTP."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import quote

import grpc
import httpx
import pytest
import trustme
from integration.test_callers import PREDICT, entry, predict_request

from testkit.certificates import Credentials, replace
from testkit.checkpoints import Chief
from testkit.front_ends import ENVOY, needs_envoy
from testkit.in_process import WAIT_SECONDS, RunningService, running_service

pytestmark = [pytest.mark.long, needs_envoy]

TOKEN = ("authorization", "Bearer of-the-app")


@dataclass(frozen=True)
class Site:
    """A service that verifies certificates of clients that have one.

    Attributes:
        known: The certificate of a caller in the file.
        unknown: One of an authority that the service does not know.
    """

    service: RunningService
    known: Credentials
    unknown: Credentials

    def outcome(self, credentials: grpc.ChannelCredentials, *metadata: tuple[str, str]) -> grpc.StatusCode:
        """Return the status of a Predict."""
        channel: Any
        with grpc.secure_channel(self.service.grpc, credentials, [("grpc.enable_retries", 0)]) as channel:
            try:
                channel.unary_unary(PREDICT)(predict_request(), metadata=metadata, timeout=WAIT_SECONDS)
            except grpc.RpcError as error:
                return cast("grpc.Call", error).code()
        return grpc.StatusCode.OK

    def without_certificate(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.known.ca.read_bytes())

    def http(self, context: ssl.SSLContext | None = None) -> httpx.Client:
        verify = context or ssl.create_default_context(cafile=self.known.ca)
        return httpx.Client(base_url=f"https://{self.service.http}", verify=verify, timeout=WAIT_SECONDS)


@pytest.fixture(scope="module")
def site(replicas: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("optional")
    Chief(folder / "run").publish(10)
    authority = trustme.CA()
    server = Credentials(folder / "server", authority, "127.0.0.1")
    groups = ("predict", "observe")
    robot = entry("robot", groups, (), 'certificates = ["robot.example.com"]')
    (folder / "callers.toml").write_text("\n".join([entry("app", groups, ("of-the-app",)), robot]), encoding="utf-8")
    settings = {
        "run_dir": folder / "run",
        "tls_cert": server.certificate,
        "tls_key": server.key,
        "tls_client_ca": server.ca,
        "tls_client_auth": "optional",
        "callers": folder / "callers.toml",
    }
    unknown = Credentials(folder / "unknown", trustme.CA(), "robot.example.com")
    replace(unknown.ca, server.ca.read_bytes())
    with running_service(settings, {}, replicas=replicas, state_dir=folder / "state", front_end=ENVOY) as service:
        service.wait_ready()
        yield Site(service, Credentials(folder / "known", authority, "robot.example.com"), unknown)


def test_a_token_needs_no_certificate_and_a_known_certificate_no_token(site: Site) -> None:
    assert site.outcome(site.without_certificate(), TOKEN) is grpc.StatusCode.OK
    assert site.outcome(site.known.channel()) is grpc.StatusCode.OK
    assert site.outcome(site.without_certificate()) is grpc.StatusCode.UNAUTHENTICATED
    with site.http() as anybody, site.http(site.known.context()) as robot:
        assert anybody.get("/metrics", headers=[TOKEN]).status_code == 200
        assert robot.get("/metrics").status_code == 200
        assert anybody.get("/metrics").status_code == 401
        assert anybody.get("/readyz").status_code == 200


def test_a_certificate_that_is_given_must_be_of_a_known_authority(site: Site) -> None:
    assert site.outcome(site.unknown.channel(), TOKEN) is grpc.StatusCode.UNAVAILABLE
    with site.http(site.unknown.context()) as unknown, pytest.raises(httpx.TransportError):
        unknown.get("/metrics", headers=[TOKEN])


def test_a_caller_without_a_certificate_cannot_say_that_it_has_one(site: Site) -> None:
    claimed = f'Cert="{quote(site.known.certificate.read_text())}"'
    claim = ("x-forwarded-client-cert", claimed)
    assert site.outcome(site.without_certificate(), claim) is grpc.StatusCode.UNAUTHENTICATED
    with site.http() as anybody:
        assert anybody.get("/metrics", headers=[claim]).status_code == 401
