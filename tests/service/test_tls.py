"""Certificates from files: what is accepted, and what a change does."""

from __future__ import annotations

import datetime as dt
import os
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509 import DNSName
from cryptography.x509 import UniformResourceIdentifier as Uri
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from testkit.certificates import SECONDS, Credentials, replace
from understudy.service.addresses import is_loopback
from understudy.service.calls.metrics import new_registry
from understudy.service.calls.served_call import served_methods
from understudy.service.grpcio.grpc_server import server_of
from understudy.service.handlers.status_handlers import HealthHandler
from understudy.service.readiness import Readiness
from understudy.service.service_errors import SettingsError
from understudy.service.services import health_service
from understudy.service.settings import ServeSettings
from understudy.service.tls import Certificates, ServerCertificates, TlsFiles, certificate_names

RUN = Path("run")
FILE = Path("file.pem")


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def server(authority: trustme.CA, tmp_path: Path) -> Credentials:
    return Credentials(tmp_path / "server", authority, "127.0.0.1")


def files_of(credentials: Credentials, *, client_ca: bool = False) -> TlsFiles:
    ca = credentials.ca if client_ca else None
    return TlsFiles(certificate=credentials.certificate, key=credentials.key, client_ca=ca)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.9", "::1", "[::1]", "localhost"])
def test_a_loopback_address_needs_neither_tls_nor_a_decision(host: str) -> None:
    assert is_loopback(host)
    assert ServeSettings(run_dir=RUN, host=host).tls_files is None


@pytest.mark.parametrize(
    "host",
    ["0.0.0.0", "::", "", "192.168.0.7", "evaluator", "localhost.example.org", "[::1", "::1]"],  # noqa: S104 - none is bound
)
def test_another_address_needs_tls_or_a_decision_against_it(host: str) -> None:
    with pytest.raises(SettingsError, match="give --tls-cert and --tls-key, or --insecure"):
        ServeSettings(run_dir=RUN, host=host)
    assert ServeSettings(run_dir=RUN, host=host, insecure=True).tls_files is None
    assert ServeSettings(run_dir=RUN, host=host, tls_cert=FILE, tls_key=FILE).tls_files is not None


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({"common_name": "ada"}, ("ada",)),
        ({"alternative": [DNSName("a.org"), Uri("spiffe://b"), DNSName("c.org")]}, ("spiffe://b", "a.org", "c.org")),
        ({"common_name": "a.example.com", "alternative": [DNSName("a.example.com")]}, ("a.example.com",)),
        ({}, ()),
    ],
)
def test_the_names_of_a_certificate_begin_with_its_uris(names: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert certificate_names(certificate_with(**names)) == expected


def test_a_certificate_that_cannot_be_read_has_no_names() -> None:
    assert certificate_names(b"-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n") == ()


def certificate_with(common_name: str | None = None, alternative: list[Any] | None = None) -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    common = [] if common_name is None else [x509.NameAttribute(x509.NameOID.COMMON_NAME, common_name)]
    now = dt.datetime.now(dt.UTC)
    builder = x509.CertificateBuilder(x509.Name([]), x509.Name(common), key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now).not_valid_after(now + dt.timedelta(days=1))
    if alternative is not None:
        builder = builder.add_extension(x509.SubjectAlternativeName(alternative), critical=False)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def test_half_of_the_settings_of_tls_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"^tls_cert is given without tls_key"):
        ServeSettings(run_dir=RUN, tls_cert=FILE)
    with pytest.raises(SettingsError, match=r"^tls_key is given without tls_cert"):
        ServeSettings(run_dir=RUN, tls_key=FILE)
    with pytest.raises(SettingsError, match=r"^tls_client_ca is given without TLS"):
        ServeSettings(run_dir=RUN, tls_client_ca=FILE)
    with pytest.raises(SettingsError, match=r"^insecure is given with tls_cert"):
        ServeSettings(run_dir=RUN, tls_cert=FILE, tls_key=FILE, insecure=True)


def test_optional_client_certificates_are_refused_where_nothing_would_name_the_others() -> None:
    tls: dict[str, Any] = {"run_dir": RUN, "tls_cert": FILE, "tls_key": FILE, "tls_client_auth": "optional"}
    for name in ("tls_client_ca", "callers"):
        given = {**tls, name: FILE}
        with pytest.raises(SettingsError, match="goes with tls_client_ca and callers"):
            ServeSettings(**given)
    both = {**tls, "tls_client_ca": FILE, "callers": FILE}
    with pytest.raises(SettingsError, match=r"gRPC for Python can only require client certificates.*--frontend envoy"):
        ServeSettings(**both)
    files = ServeSettings(**both, frontend="envoy").tls_files
    assert files is not None
    assert not files.requires_client


def test_files_that_cannot_be_used_are_named(server: Credentials, authority: trustme.CA, tmp_path: Path) -> None:
    other = Credentials(tmp_path / "other", authority, "127.0.0.1")
    missing, text = tmp_path / "missing.pem", tmp_path / "text.pem"
    text.write_text("no certificate")
    good = {"certificate": server.certificate, "key": server.key, "client_ca": server.ca}
    for changed, error in (
        ({"certificate": missing}, f"--tls-cert {missing} cannot be read"),
        ({"key": missing}, f"--tls-key {missing} cannot be read"),
        ({"client_ca": missing}, f"--tls-client-ca {missing} cannot be read"),
        ({"certificate": text}, f"--tls-cert {text} holds no certificate"),
        ({"client_ca": text}, f"--tls-client-ca {text} holds no certificate"),
        ({"key": text}, f"--tls-key {text} cannot be used"),
        ({"key": other.key}, f"--tls-key {other.key} is not the key of the certificate in {server.certificate}"),
    ):
        with pytest.raises(SettingsError) as refused:
            Certificates.read(TlsFiles(**{**good, **changed}))  # type: ignore[arg-type]  # all are files
        assert str(refused.value).startswith(error)


def test_an_encrypted_key_is_refused_without_asking_for_its_password(server: Credentials) -> None:
    from cryptography.hazmat.primitives import serialization as pem

    key = pem.load_pem_private_key(server.key.read_bytes(), None)
    encrypted = pem.BestAvailableEncryption(b"secret")
    replace(server.key, key.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, encrypted))
    with pytest.raises(SettingsError, match="give an unencrypted private key"):
        Certificates.read(files_of(server))


def test_unchanged_files_are_not_read_again(server: Credentials) -> None:
    certificates = ServerCertificates(files_of(server, client_ca=True))
    before = certificates.current
    certificates.refresh()
    assert certificates.current is before


def test_a_change_is_used_when_the_files_belong_together_again(server: Credentials, authority: trustme.CA) -> None:
    certificates = ServerCertificates(files_of(server))
    seen: list[Certificates] = []
    certificates.on_change(seen.append)
    before, certificate, key = certificates.current, server.certificate.read_bytes(), server.key.read_bytes()
    server.renew(authority)
    renewed = server.certificate.read_bytes()

    replace(server.certificate, certificate)  # the new key has arrived, its certificate has not
    with capture_logs() as logs:
        certificates.refresh()
        certificates.refresh()
    assert certificates.current is before
    (line,) = logs
    assert line["log_level"] == "error"
    assert str(server.key) in line["reason"]

    server.certificate.unlink()
    certificates.refresh()
    assert certificates.current is before

    os.mkfifo(server.certificate)
    certificates.refresh()
    assert certificates.current is before

    replace(server.certificate, renewed)
    certificates.refresh()
    assert certificates.current.certificate == renewed
    assert certificates.current.key != key
    assert seen == [certificates.current]


def test_a_callback_that_fails_is_called_again(server: Credentials, authority: trustme.CA) -> None:
    certificates = ServerCertificates(files_of(server))
    failures = [OSError("disk full")]

    def fail_once(_: Certificates) -> None:
        if failures:
            raise failures.pop()

    certificates.on_change(fail_once)
    server.renew(authority)
    before = certificates.current
    with pytest.raises(OSError, match="disk full"):
        certificates.refresh()
    assert certificates.current is before
    certificates.refresh()
    assert certificates.current.certificate == server.certificate.read_bytes()


async def test_without_authorities_of_clients_every_client_is_served(server: Credentials, tmp_path: Path) -> None:
    readiness = Readiness()
    readiness.become_ready()
    health = HealthHandler(readiness, [])
    service = health_service(health)
    front_end = server_of(ServeSettings(run_dir=tmp_path), ServerCertificates(files_of(server)))
    port = front_end.bind("127.0.0.1", 0)
    await front_end.start(served_methods([service], new_registry()))
    try:
        roots = grpc.ssl_channel_credentials(server.ca.read_bytes())
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", roots) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            response = await stub.Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
    finally:
        await front_end.drain(0)
    assert response.status == health_pb2.HealthCheckResponse.SERVING
