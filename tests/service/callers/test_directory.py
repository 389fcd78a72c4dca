"""Who calls: by token, JSON Web Token and certificate, while the files change."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import re
import ssl
import time
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import trustme
from joserfc.jwk import OctKey
from structlog.testing import capture_logs

from testkit.certificates import Credentials, replace
from testkit.web_tokens import TokenIssuer
from understudy.service.callers import directory as directory_module
from understudy.service.callers import web_tokens
from understudy.service.callers.callers_file import hash_text
from understudy.service.callers.directory import CallerDirectory
from understudy.service.callers.web_tokens import MAX_JWKS_BYTES, IssuerKeys
from understudy.service.calls.caller import Group
from understudy.service.calls.status import UnauthenticatedError


class Site:
    """A file of callers, and the directory that reads it."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "callers.toml"
        self.keys = folder / "keys.json"
        self.issuer = TokenIssuer()
        self.issuer.publish(self.keys)
        self.now = time.time()
        self.write("old")
        self.directory = CallerDirectory(self.file, clock=lambda: self.now)

    def write(self, *tokens: str, jwks: str = "keys.json", more: str = "") -> None:
        hashes = ", ".join(f'"{hash_text(token)}"' for token in tokens)
        text = f"""
            [[callers]]
            name = "ada"
            groups = ["predict"]
            tokens = [{hashes}]
            certificates = ["ada.example.com", "spiffe://example.com/ada"]

            [[issuers]]
            name = "corp"
            issuer = "https://login.example.com"
            audience = "understudy"
            jwks = "{jwks}"
            groups = {{ scientists = ["predict", "evaluate"], leads = ["promote"] }}
            {more}
        """
        replace(self.file, text.encode())

    def name(self, token: str) -> str:
        return self.directory.identify(f"Bearer {token}", lambda: ()).name

    def refusal(self, token: str) -> str:
        with pytest.raises(UnauthenticatedError) as refused:
            self.name(token)
        assert token not in str(refused.value)
        return str(refused.value)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_a_token_is_known_by_its_hash(site: Site) -> None:
    assert site.name("old") == "ada"
    assert site.directory.identify(b"bearer old", lambda: ()).name == "ada"
    assert "is not known here" in site.refusal("older")


@pytest.mark.parametrize("header", ["", "old", "Basic b2xk", "Bearer", "Bearer "])
def test_another_header_is_refused(site: Site, header: str) -> None:
    with pytest.raises(UnauthenticatedError, match="is not 'Bearer TOKEN'"):
        site.directory.identify(header, lambda: ("ada.example.com",))


def test_a_certificate_is_known_by_any_of_its_names(site: Site) -> None:
    for name in ("ada.example.com", "spiffe://example.com/ada"):
        assert site.directory.identify(None, lambda name=name: ("other", name)).name == "ada"  # type: ignore[misc]
    with pytest.raises(UnauthenticatedError, match="the certificate of 'eve' belongs to no known caller"):
        site.directory.identify(None, lambda: ("eve",))
    with pytest.raises(UnauthenticatedError, match="neither a token nor a client certificate"):
        site.directory.identify(None, lambda: ())


@pytest.mark.parametrize("unusable", [b"[[callers", b"limits = " + b"[" * 50_000, b"limits = " + b"9" * 5000])
def test_a_changed_file_is_used_and_an_unusable_one_is_not(site: Site, unusable: bytes) -> None:
    site.write("old", "new")
    site.directory.refresh()
    assert {site.name("old"), site.name("new")} == {"ada"}
    replace(site.file, unusable)
    with capture_logs() as lines:
        site.directory.refresh()
        site.directory.refresh()
    assert [line["event"] for line in lines] == ["kept the old callers, because the new file cannot be used"]
    site.file.unlink()
    os.mkfifo(site.file)
    site.directory.refresh()
    assert site.name("new") == "ada"
    site.write("new")
    site.directory.refresh()
    assert "is not known here" in site.refusal("old")


def test_a_web_token_names_its_caller_and_groups(site: Site) -> None:
    token = site.issuer.token("grace", "scientists", "unknown")
    caller = site.directory.identify(f"Bearer {token}", lambda: ())
    assert (caller.name, caller.groups) == ("corp/grace", frozenset({Group.PREDICT, Group.EVALUATE}))
    assert site.directory.identify(f"Bearer {token}", lambda: ()) is caller


def test_a_web_token_that_is_not_for_us_is_refused(site: Site) -> None:
    sign = site.issuer.token
    here = r"by this server's clock, at \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"
    assert re.search(rf"the token has expired {here}; get a new one", site.refusal(sign(exp=int(time.time()) - 60)))
    later = int(time.time()) + 600
    for early in (sign(nbf=later), sign(iat=later)):
        refusal = site.refusal(early)
        assert re.search(rf"the token of the issuer 'corp' is not valid yet {here}; compare the clocks", refusal)
    for wrong in (
        sign(aud="another"),
        sign(exp=None),
        sign(exp=10**400),
        sign(groups={"scientists": False}),
        sign(sub=None),
        sign(sub="line\nbreak"),
        sign()[:-8] + "AAAAAAAA",
        TokenIssuer().token(),
    ):
        assert "the token of the issuer 'corp' is not valid" in site.refusal(wrong)
    assert "of an issuer that is not known" in site.refusal(sign(iss="https://evil.example.com"))
    for malformed in ("a.b.c", "..", sign(iss=None), sign(iss=["https://login.example.com"]), "e30.e30.e30"):
        assert "is no JSON Web Token with an issuer" in site.refusal(malformed)
    assert "more than 8192 characters" in site.refusal(sign("x" * 8192))


def test_only_the_listed_algorithms_are_accepted(site: Site) -> None:
    site.write("old", more='algorithms = ["RS256"]')
    site.directory.refresh()
    assert "unsupported_algorithm" in site.refusal(site.issuer.token())
    claims = {"iss": site.issuer.issuer, "aud": site.issuer.audience, "sub": "eve", "exp": int(time.time()) + 300}
    parts = [urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in ({"alg": "HS256"}, claims)]
    signature = hmac.digest(site.issuer.key.as_pem(private=False), b".".join(parts), "sha256")
    forged = b".".join([*parts, urlsafe_b64encode(signature).rstrip(b"=")]).decode()
    assert "unsupported_algorithm" in site.refusal(forged)


def test_a_known_web_token_expires(site: Site) -> None:
    token = site.issuer.token()
    assert site.name(token) == "corp/ada"
    site.now += 1000.0
    assert "the token has expired" in site.refusal(token)


def test_verified_web_tokens_are_remembered_up_to_a_bound(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_module, "MAX_VERIFIED", 3)
    for number in range(10):
        site.name(site.issuer.token(f"caller-{number}"))
    assert len(site.directory._known._verified) == 3


def test_new_keys_in_the_file_are_used_and_the_old_ones_no_longer(site: Site) -> None:
    old = site.issuer.token()
    assert site.name(old) == "corp/ada"
    site.issuer.renew()
    replace(site.keys, site.issuer.jwks())
    site.directory.refresh()
    assert site.name(site.issuer.token()) == "corp/ada"
    assert "is not valid" in site.refusal(old)


def test_unusable_keys_change_nothing(site: Site) -> None:
    secret: Any = OctKey.generate_key(256).as_dict()
    for unusable in (b"", b"[]", b'{"keys": []}', b'{"keys": [{"kty": "oct", "k": "' + secret["k"].encode() + b'"}]}'):
        replace(site.keys, unusable)
        with capture_logs() as lines:
            site.directory.refresh()
        assert [line["event"] for line in lines] == ["cannot use the keys of an issuer"]
        assert site.name(site.issuer.token()) == "corp/ada"
    site.keys.unlink()
    os.mkfifo(site.keys)
    site.directory.refresh()
    assert site.name(site.issuer.token()) == "corp/ada"


class KeyServer:
    """Serves the keys of an issuer over HTTP.

    Args:
        issuer: Whose keys.
        certificate: That of the server; without, it speaks plain HTTP.
    """

    def __init__(self, issuer: TokenIssuer, certificate: Credentials | None = None) -> None:
        self.issuer = issuer
        self.status = 200
        self.asked = 0
        self.answer: Callable[[BaseHTTPRequestHandler], object] = self.give_keys
        self.ended = Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked += 1
                with contextlib.suppress(OSError):  # the caller went
                    outer.answer(self)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class calls it so
                del format, args

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        if certificate is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(certificate.certificate, certificate.key)
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        scheme, host = ("http", "127.0.0.1") if certificate is None else ("https", "localhost")
        self.url = f"{scheme}://{host}:{self.server.server_port}/keys"

    def give_keys(self, request: BaseHTTPRequestHandler) -> None:
        request.send_response(self.status)
        request.send_header("location", "/elsewhere")
        request.end_headers()
        request.wfile.write(self.issuer.jwks())

    def drip(self, request: BaseHTTPRequestHandler) -> None:
        """Answer one byte at a time, without end."""
        request.wfile.write(b"HTTP/1.0 200 OK\r\nx: ")
        while not self.ended.wait(0.02):
            request.wfile.write(b"y")


@contextlib.contextmanager
def serving(served: KeyServer) -> Iterator[KeyServer]:
    thread = Thread(target=served.server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield served
    finally:
        served.ended.set()
        served.server.shutdown()
        thread.join()
        served.server.server_close()


@pytest.fixture
def key_server() -> Iterator[KeyServer]:
    with serving(KeyServer(TokenIssuer())) as served:
        yield served


def test_keys_at_a_url_are_fetched_again_in_time_or_when_one_is_unknown(key_server: KeyServer) -> None:
    now = 0.0
    keys = IssuerKeys(key_server.url, clock=lambda: now)
    assert keys.refresh()
    assert not keys.refresh()
    assert key_server.asked == 1
    key_server.issuer.renew()
    for seconds, asked in ((9.0, 1), (10.0, 2), (11.0, 2)):
        now = seconds
        keys.refresh_soon()
        keys.refresh()
        assert key_server.asked == asked
    assert [key.kid for key in keys.current or ()] == ["second"]
    now = 1000.0
    assert not keys.refresh()
    assert key_server.asked == 3


@pytest.mark.parametrize("status", [302, 404, 500])
def test_keys_that_cannot_be_fetched_are_asked_for_again(key_server: KeyServer, status: int) -> None:
    now = 0.0
    key_server.status = status
    keys = IssuerKeys(key_server.url, clock=lambda: now)
    with capture_logs() as lines:
        assert not keys.refresh()
    assert lines[0]["consequence"] == "refuse its tokens"
    assert key_server.asked == 1
    key_server.status, now = 200, 10.0
    assert keys.refresh()


def test_keys_are_fetched_over_https_from_a_server_whose_authority_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = Credentials(tmp_path, trustme.CA(), "localhost")
    now = 0.0
    with serving(KeyServer(TokenIssuer(), certificate)) as served, capture_logs() as lines:
        keys = IssuerKeys(served.url, clock=lambda: now)
        assert not keys.refresh()
        assert "certificate verify failed" in lines[0]["reason"]
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate.ca))
        now = 10.0
        assert keys.refresh()
    assert [key.kid for key in keys.current or ()] == ["first"]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"no HTTP at all\r\n\r\n", "illegal status line"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n{", "without sending complete message body"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 100_000, "recursion"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b" " * (MAX_JWKS_BYTES + 1), "more than 1048576 bytes"),
    ],
    ids=["no_http", "cut_off", "deep", "long"],
)
def test_keys_that_are_answered_wrongly_are_asked_for_again(key_server: KeyServer, answer: bytes, reason: str) -> None:
    now = 0.0
    keys = IssuerKeys(key_server.url, clock=lambda: now)
    key_server.answer = lambda request: request.wfile.write(answer)
    with capture_logs() as lines:
        assert not keys.refresh()
    assert reason in lines[0]["reason"]
    key_server.answer, now = key_server.give_keys, 10.0
    assert keys.refresh()


def test_an_issuer_that_answers_byte_by_byte_is_left_in_time(
    key_server: KeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_tokens, "TIMEOUT_SECONDS", 0.3)
    key_server.answer = key_server.drip
    with capture_logs() as lines:
        assert not IssuerKeys(key_server.url).refresh()
    assert lines[0]["reason"] == "TimeoutError"
