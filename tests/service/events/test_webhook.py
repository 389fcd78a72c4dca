from __future__ import annotations

import json
import logging
import os
import queue
import socket
import ssl
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import trustme
from standardwebhooks import WebhookVerificationError

from testkit.certificates import Credentials
from testkit.webhook_receiver import SECRET, Receiver, receiving, status
from understudy.evaluator.records.events import Event, EventType
from understudy.service.events.exporter import DeliveryError
from understudy.service.events.webhook import Webhook, source_of
from understudy.service.events.webhook_settings import SECRET_VARIABLE, destination_name, secrets_from
from understudy.service.service_errors import SettingsError

OTHER_SECRET = "whsec_" + "QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVo="
NAME = destination_name("https://example.com/a")
OTHER_NAME = destination_name("https://example.org/a")
EVENT = Event(
    type=EventType.SCORED,
    step=40,
    checkpoint_digest="d" * 64,
    occurred_at=1_700_000_000.25,
    data={"dataset": '<script>alert("x")</script>\r\nwebhook-id: 1', "metrics": {"loss": "nan", "ä": 0.5}},
)


def webhook(url: str, **options: Any) -> Webhook:
    chosen: dict[str, Any] = {"source": source_of("my model"), "secrets": lambda: [SECRET], "timeout_seconds": 20.0}
    return Webhook(url, **(chosen | options))


def test_an_event_is_a_signed_cloud_event(receiver: Receiver) -> None:
    webhook(receiver.url).export(EVENT)

    (received,) = receiver.wait_for(1)
    event = received.verified()
    assert (event.get_id(), event.get_source(), event.get_specversion()) == (EVENT.id, "/understudy/my%20model", "1.0")
    assert (event.get_type(), event.get_subject()) == ("understudy.checkpoint.scored", "40")
    assert event.get_time() is not None
    assert event.get_time().timestamp() == EVENT.occurred_at
    assert event.get_data() == {"step": 40, "checkpoint_digest": "d" * 64, **EVENT.data}
    assert received.headers["content-type"].startswith("application/cloudevents+json")
    assert abs(int(received.headers["webhook-timestamp"]) - time.time()) < 60
    assert received.path == "/events"


def test_a_changed_body_or_another_secret_is_noticed(receiver: Receiver) -> None:
    webhook(receiver.url).export(EVENT)

    (received,) = receiver.wait_for(1)
    with pytest.raises(WebhookVerificationError):
        received.verified(OTHER_SECRET)
    changed = json.dumps({**json.loads(received.body), "subject": "41"}).encode()
    with pytest.raises(WebhookVerificationError):
        type(received)(received.path, received.headers, changed).verified()


def test_while_a_secret_changes_there_is_a_signature_by_each(receiver: Receiver, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(f"{SECRET}\n{OTHER_SECRET}\n")
    sender = webhook(receiver.url, secrets=secrets_from(file, [NAME])[NAME])
    sender.export(EVENT)
    file.write_text(f"{OTHER_SECRET}\n")
    sender.export(EVENT)

    both, new = receiver.wait_for(2)
    assert both.verified().get_id() == both.verified(OTHER_SECRET).get_id() == EVENT.id
    new.verified(OTHER_SECRET)
    with pytest.raises(WebhookVerificationError):
        new.verified()
    file.unlink()
    with pytest.raises(DeliveryError, match="cannot be read"):
        sender.export(EVENT)


@pytest.mark.parametrize("code", [199 + 201, 404, 410, 500, 503])
def test_a_status_that_is_no_success_is_a_failure(receiver: Receiver, code: int) -> None:
    receiver.always = status(code)

    with pytest.raises(DeliveryError, match=f"^status {code}$"):
        webhook(receiver.url).export(EVENT)


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_redirect_is_a_failure_and_is_not_followed(receiver: Receiver, code: int) -> None:
    receiver.answers.append(status(code, location=receiver.url.replace("events", "elsewhere")))

    with pytest.raises(DeliveryError, match=f"^status {code}, and redirects are not followed$"):
        webhook(receiver.url).export(EVENT)
    assert [each.path for each in receiver.received] == ["/events"]


def test_a_receiver_that_hangs_is_given_up(receiver: Receiver) -> None:
    receiver.always = receiver.hang
    began = time.monotonic()

    with pytest.raises(DeliveryError, match=r"^no answer within 0\.3 s$"):
        webhook(receiver.url, timeout_seconds=0.3).export(EVENT)
    assert time.monotonic() - began < 60


def test_a_receiver_that_answers_a_byte_at_a_time_is_given_up(receiver: Receiver) -> None:
    def drip(request: BaseHTTPRequestHandler) -> None:
        for byte in b"HTTP/1.1 200 OK\r\nx: " + b"x" * 10_000:
            request.wfile.write(bytes([byte]))
            request.wfile.flush()
            if receiver.released.wait(0.05):
                return

    receiver.always = drip
    with pytest.raises(DeliveryError, match="no answer within 1 s"):
        webhook(receiver.url, timeout_seconds=1.0).export(EVENT)


def test_a_name_that_is_not_resolved_in_time_holds_up_neither_the_next_attempt_nor_the_end_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given_up = threading.Event()
    outcomes: queue.Queue[bool] = queue.Queue()
    before = set(threading.enumerate())

    def resolve(*_: Any, **__: Any) -> Any:
        outcomes.put(given_up.wait(3.0))
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(DeliveryError, match=r"^no answer within 0\.1 s$"):
        webhook("http://events.example.com/", timeout_seconds=0.1).export(EVENT)
    waited_for = [thread.name for thread in set(threading.enumerate()) - before if not thread.daemon]
    given_up.set()
    assert outcomes.get(timeout=30.0)
    assert waited_for == []


def test_the_body_of_an_answer_is_not_read(receiver: Receiver) -> None:
    written: list[int] = []

    def endless(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        while not receiver.released.is_set():
            written.append(request.wfile.write(bytes(1 << 20)))

    receiver.always = endless
    webhook(receiver.url).export(EVENT)
    assert sum(written) < 1 << 27


@pytest.mark.parametrize("answer", [b"SSH-2.0-OpenSSH\r\n", b"", b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 100_000])
def test_what_is_no_answer_is_a_failure(receiver: Receiver, answer: bytes) -> None:
    def write(request: BaseHTTPRequestHandler) -> None:
        request.wfile.write(answer)

    receiver.always = write
    with pytest.raises(DeliveryError, match=r"^the request failed: RemoteProtocolError$"):
        webhook(receiver.url).export(EVENT)


def test_no_secret_of_the_url_is_in_an_error_or_a_log(receiver: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    address = receiver.url.removeprefix("http://").removesuffix("/events")
    url = f"http://user:hunter2@{address}/T0K3N?key=s3cr3t"
    for each in (status(200), status(500), status(302, location=url), receiver.hang):
        receiver.answers.append(each)
    sender = webhook(url, timeout_seconds=1.0)
    errors = []
    sender.export(EVENT)
    for _ in range(3):
        with pytest.raises(DeliveryError) as error:
            sender.export(EVENT)
        errors.append(str(error.value))
    with pytest.raises(DeliveryError) as refused:
        webhook(url.replace(address, "127.0.0.1:1")).export(EVENT)

    assert receiver.received[0].headers["authorization"] == "Basic dXNlcjpodW50ZXIy"
    assert receiver.received[0].path == "/T0K3N?key=s3cr3t"
    assert str(refused.value).startswith("cannot connect: ")
    text = caplog.text + " ".join(errors) + str(refused.value) + destination_name(url)
    assert not [secret for secret in ("hunter2", "dXNlcjpodW50ZXIy", "T0K3N", "s3cr3t", SECRET[6:]) if secret in text]


@pytest.fixture
def credentials(tmp_path: Path) -> Credentials:
    return Credentials(tmp_path, trustme.CA(), "127.0.0.1")


def test_a_certificate_is_verified(credentials: Credentials, monkeypatch: pytest.MonkeyPatch) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(credentials.certificate, credentials.key)
    with receiving(context) as receiver:
        with pytest.raises(DeliveryError, match=r"cannot connect: .*CERTIFICATE_VERIFY_FAILED"):
            webhook(receiver.url).export(EVENT)
        assert not receiver.received
        monkeypatch.setenv("SSL_CERT_FILE", str(credentials.ca))
        webhook(receiver.url).export(EVENT)
        receiver.received[0].verified()
        with pytest.raises(DeliveryError, match="cannot connect: "):
            webhook(receiver.url.replace("127.0.0.1", "localhost")).export(EVENT)


def test_the_name_of_a_webhook_tells_urls_apart() -> None:
    names = [
        destination_name(url)
        for url in ("https://example.com/a", "https://example.com/b", "http://example.com:8080/a", "http://[::1]/a")
    ]

    assert len(set(names)) == 4
    assert names[2].startswith("example.com:8080-")
    assert destination_name("https://user:password@example.com/a") == names[0]


@pytest.mark.parametrize(
    "url", ["example.com", "ftp://example.com", "https://", "https://[::1", "https://a b/", "https://a:99999/", ""]
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(SettingsError, match=r"^webhook is no URL"):
        destination_name(url)


def test_secrets_come_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    with pytest.raises(SettingsError, match=f"give webhook_secret_file, or the variable {SECRET_VARIABLE}"):
        secrets_from(None, [NAME])
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    assert secrets_from(None, [NAME])[NAME]() == [SECRET]
    file = tmp_path / "secret"
    with pytest.raises(SettingsError, match="cannot be read"):
        secrets_from(file, [NAME])
    os.mkfifo(file)
    with pytest.raises(SettingsError, match="it is no regular file"):
        secrets_from(file, [NAME])
    file.unlink()
    file.write_text(f"{OTHER_SECRET}\n")
    assert secrets_from(file, [NAME])[NAME]() == [OTHER_SECRET]


@pytest.mark.parametrize("label", [NAME, NAME.rpartition("-")[0]], ids=["its name", "its host"])
def test_a_webhook_has_secrets_of_its_own_and_the_others_share_those_without_a_name(tmp_path: Path, label: str) -> None:
    file = tmp_path / "secrets"
    file.write_text(f"{SECRET}\n{label}={OTHER_SECRET}\n{label}={SECRET}\n")
    secrets = secrets_from(file, [NAME, OTHER_NAME])

    assert secrets[NAME]() == [OTHER_SECRET, SECRET]
    assert secrets[OTHER_NAME]() == [SECRET]
    file.write_text(f"{SECRET}\n{label}={SECRET}\n")
    assert secrets[NAME]() == [SECRET]


def test_no_receiver_can_check_or_make_the_signatures_of_another(tmp_path: Path) -> None:
    file = tmp_path / "secrets"
    with receiving() as first, receiving() as second:
        names = [destination_name(each.url) for each in (first, second)]
        file.write_text(f"{names[0]}={SECRET}\n{names[1]}={OTHER_SECRET}\n")
        secrets = secrets_from(file, names)
        for each, name in zip((first, second), names, strict=True):
            webhook(each.url, secrets=secrets[name]).export(EVENT)
        (one,), (other,) = first.wait_for(1), second.wait_for(1)

    one.verified(SECRET)
    other.verified(OTHER_SECRET)
    for received, secret in ((one, OTHER_SECRET), (other, SECRET)):
        with pytest.raises(WebhookVerificationError):
            received.verified(secret)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{NAME}={SECRET}", f"webhook {OTHER_NAME} needs a secret to sign with"),
        (f"{SECRET} elsewhere.org={SECRET}", f"secret 2 .* before the = name one of {NAME}, {OTHER_NAME}, or its host"),
        (f"{SECRET} " * 9, f"9 secrets for webhook {NAME}; give 8 at most"),
    ],
)
def test_secrets_that_do_not_fit_the_webhooks_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "secrets"
    file.write_text(text)

    with pytest.raises(SettingsError, match=message) as refused:
        secrets_from(file, [NAME, OTHER_NAME])
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    "text",
    ["", "hunter2hunter2", "whsec_c2hvcnQ=", "whsec_" + "QUJD" * 30, "whsec_???", "x " * 9, f"{NAME}=whsec_c2hvcnQ="],
)
def test_what_is_no_secret_is_refused_without_being_shown(tmp_path: Path, text: str) -> None:
    file = tmp_path / "secret"
    file.write_text(text)
    with pytest.raises(SettingsError) as refused:
        secrets_from(file, [NAME])
    assert not [part for part in text.split() if len(part) > 1 and part.removeprefix("whsec_") in str(refused.value)]
