"""Credentials, metadata, interceptors and options of both clients, as grpcio's own users know them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest
import trustme
from grpc import aio

from testkit.certificates import replace
from testkit.peer_server import STEP, Failure, Peer
from testkit.ports import BEHIND_A_PROXY
from understudy.clients import (
    AsyncClient,
    CallOptions,
    Client,
    DeadlineExceededError,
    MessageTooLargeError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
)
from understudy.clients.channel import is_on_this_machine

ROWS = np.ones((2, 4), np.float32)
SECONDS = 20
CALLS: dict[str, tuple[Any, ...]] = {
    "predict": (ROWS,),
    "predict_many": ([ROWS, ROWS],),
    "evaluate": ([(ROWS, ROWS)],),
    "evaluate_dataset": ("test",),
    "list_evaluations": (),
    "watch_evaluations": (),
    "metadata": (),
    "status": (),
    "checkpoints": (),
    "promote": (STEP,),
    "unpin": (),
    "roll_back": (),
    "metrics": (),
    "is_serving": (),
}
"""The arguments of every method that calls a server, but `compare`, which the peer refuses."""

OWN_TOKEN: dict[str, Any] = {"token": "of-the-client"}

Kind = type[Client] | type[AsyncClient]
both_clients = pytest.mark.parametrize("kind", [Client, AsyncClient])


def call(kind: Kind, target: str, name: str, call_options: CallOptions | None = None, **client: Any) -> Any:
    """Call one method of a client with these arguments, and return its result or the first that it yields."""
    arguments = {"timeout_seconds": SECONDS, "stream_timeout_seconds": SECONDS, **client}
    method_arguments = CALLS[name]
    if issubclass(kind, Client):
        with kind(target, **arguments) as synchronous:
            result = getattr(synchronous, name)(*method_arguments, **(call_options or {}))
            if isinstance(result, Generator):
                first = next(result)
                result.close()
                return first
            return result

    async def run() -> Any:
        async with AsyncClient(target, **arguments) as asynchronous:
            result = getattr(asynchronous, name)(*method_arguments, **(call_options or {}))
            if isinstance(result, AsyncGenerator):
                first = await anext(result)
                await result.aclose()
                return first
            return await result

    return asyncio.run(run())


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def roots(authority: trustme.CA) -> bytes:
    return authority.cert_pem.bytes()


def server_credentials(authority: trustme.CA, *, asks_for_certificates: bool = False) -> grpc.ServerCredentials:
    certificate = authority.issue_cert("127.0.0.1")
    chain = b"".join(blob.bytes() for blob in certificate.cert_chain_pems)
    return grpc.ssl_server_credentials(
        [(certificate.private_key_pem.bytes(), chain)],
        root_certificates=authority.cert_pem.bytes() if asks_for_certificates else None,
        require_client_auth=asks_for_certificates,
    )


@pytest.fixture
def secure_peer(authority: trustme.CA) -> Iterator[Peer]:
    with Peer(credentials=server_credentials(authority)) as peer:
        peer.script.record(STEP)
        yield peer


@pytest.fixture
def recording_peer(peer: Peer) -> Peer:
    """A peer with an entry in its ledger, so that lists and watches yield something."""
    peer.script.record(STEP)
    return peer


@both_clients
@pytest.mark.parametrize("name", CALLS)
def test_every_call_goes_over_tls(kind: Kind, name: str, secure_peer: Peer, roots: bytes) -> None:
    assert call(kind, secure_peer.target, name, credentials=grpc.ssl_channel_credentials(roots)) is not None


@both_clients
def test_a_server_with_an_unknown_certificate_is_not_called(kind: Kind, secure_peer: Peer) -> None:
    unknown = trustme.CA().cert_pem.bytes()
    with pytest.raises(UnavailableError):
        call(kind, secure_peer.target, "status", credentials=grpc.ssl_channel_credentials(unknown))
    with pytest.raises(UnavailableError):
        call(kind, secure_peer.target, "status")
    assert not secure_peer.script.calls


@both_clients
def test_a_client_shows_its_certificate(kind: Kind, authority: trustme.CA, roots: bytes) -> None:
    own = authority.issue_cert("client")
    chain = b"".join(blob.bytes() for blob in own.cert_chain_pems)
    known = grpc.ssl_channel_credentials(roots, own.private_key_pem.bytes(), chain)
    with Peer(credentials=server_credentials(authority, asks_for_certificates=True)) as peer:
        assert call(kind, peer.target, "status", credentials=known).serving_step == STEP
        with pytest.raises(UnavailableError):
            call(kind, peer.target, "status", credentials=grpc.ssl_channel_credentials(roots))


@both_clients
@pytest.mark.parametrize("name", sorted(CALLS.keys() - {"is_serving"}))
def test_a_token_goes_with_every_call_of_a_client(kind: Kind, name: str, secure_peer: Peer, roots: bytes) -> None:
    channel = grpc.ssl_channel_credentials(roots)
    token = grpc.access_token_call_credentials("of-the-client")
    call(kind, secure_peer.target, name, credentials=grpc.composite_channel_credentials(channel, token))
    assert {sent["authorization"] for _, sent in secure_peer.script.metadata} == {"Bearer of-the-client"}


@both_clients
@pytest.mark.parametrize("name", sorted(CALLS.keys() - {"is_serving"}))
def test_options_of_one_call_reach_the_server(kind: Kind, name: str, secure_peer: Peer, roots: bytes) -> None:
    options: CallOptions = {
        "metadata": [("tenant", "blue")],
        "credentials": grpc.access_token_call_credentials("of-the-call"),
        "wait_for_ready": True,
        "timeout_seconds": SECONDS,
    }
    metadata = [("team", "lead")]
    call(kind, secure_peer.target, name, options, credentials=grpc.ssl_channel_credentials(roots), metadata=metadata)
    assert secure_peer.script.metadata
    for _, sent in secure_peer.script.metadata:
        assert (sent["team"], sent["tenant"], sent["authorization"]) == ("lead", "blue", "Bearer of-the-call")


@both_clients
def test_call_credentials_are_not_sent_without_tls(kind: Kind, peer: Peer) -> None:
    options: CallOptions = {"credentials": grpc.access_token_call_credentials("secret")}
    with pytest.raises(UnauthenticatedError, match="over secure channels only"):
        call(kind, peer.target, "predict", options)
    assert not peer.script.calls


@both_clients
def test_an_option_that_does_not_exist_is_a_mistake_of_the_program(kind: Kind, peer: Peer) -> None:
    options: Any = {"time_out": 3}
    for name in CALLS:
        with pytest.raises(TypeError, match="time_out"):
            call(kind, peer.target, name, options)


@both_clients
@pytest.mark.parametrize("name", sorted(CALLS.keys() - {"is_serving"}))
def test_the_client_s_own_token_goes_with_every_call(kind: Kind, name: str, recording_peer: Peer) -> None:
    call(kind, recording_peer.target, name, **OWN_TOKEN)
    assert {sent["authorization"] for _, sent in recording_peer.script.metadata} == {"Bearer of-the-client"}


@both_clients
def test_a_call_s_own_authorization_replaces_the_client_s_token(kind: Kind, secure_peer: Peer, roots: bytes) -> None:
    client = {"credentials": grpc.ssl_channel_credentials(roots), **OWN_TOKEN}
    call(kind, secure_peer.target, "status", {"metadata": [("authorization", "Bearer of-the-call")]}, **client)
    credentials = grpc.access_token_call_credentials("of-the-call")
    call(kind, secure_peer.target, "status", {"credentials": credentials}, **client)
    assert [sent["authorization"] for _, sent in secure_peer.script.metadata] == ["Bearer of-the-call"] * 2


async def test_a_token_file_is_read_again_when_it_changes(peer: Peer, tmp_path: Path) -> None:
    file = tmp_path / "token"
    replace(file, b"first\n")

    def last() -> str:
        return str(peer.script.metadata[-1][1]["authorization"])

    with Client(peer.target, token_file=file) as client:
        async with AsyncClient(peer.target, token_file=str(file)) as asynchronous:
            for content, expected in (
                (b"first\n", "first"),
                (b"second", "second"),
                (b"", "second"),
                (b"\xff", "second"),
                (None, "second"),
                (b"third\n", "third"),
            ):
                if content is None:
                    file.unlink()
                else:
                    replace(file, content)
                client.status()
                assert last() == f"Bearer {expected}"
                await asynchronous.status()
                assert last() == f"Bearer {expected}"


@both_clients
def test_a_token_does_not_leave_this_machine_without_tls_unless_told_to(kind: Kind, tmp_path: Path) -> None:
    targets = [["127.0.0.1:8500", "10.0.0.1:8500"], "models.example.com:8500", "dns:///models.example.com"]
    (tmp_path / "token").write_text("secret")
    for target in targets:
        for source in ({"token": "secret"}, {"token_file": tmp_path / "token"}):
            with pytest.raises(ValueError, match=r"would be sent to .* without TLS; give credentials="):
                kind(target, **source)


@pytest.mark.parametrize("how", [{"token_without_tls": True}, {"credentials": grpc.ssl_channel_credentials()}])
def test_a_token_leaves_this_machine_over_tls_or_if_told_to(how: dict[str, Any]) -> None:
    with Client("models.invalid:8500", **OWN_TOKEN, **how) as client, pytest.raises(UnavailableError):
        client.promote(1)


@pytest.mark.parametrize(
    "target",
    [
        *("localhost:8500", "127.0.0.1:8500", "127.8.9.1", "[::1]:8500", "ipv6:[::1]:8500", "dns:///localhost:8500"),
        *("ipv4:127.0.0.1:8500,127.0.0.2:8500", "dns:localhost:8500", "unix:/run/understudy.sock"),
    ],
)
def test_targets_on_this_machine_are_known_by_their_text(target: str) -> None:
    assert is_on_this_machine(target)


@pytest.mark.parametrize(
    "target",
    [
        *("ipv4:127.0.0.1:8500,10.0.0.1:8500", "dns://10.0.0.1/localhost:8500", "xds:///localhost:8500"),
        *("127.0.0.1.example.com:8500", "localhost.example.com:8500", "0.0.0.0:8500", "example.com:8500"),
    ],
)
def test_other_targets_count_as_other_machines(target: str) -> None:
    assert not is_on_this_machine(target)


@both_clients
def test_servers_on_this_machine_are_called_directly_behind_a_proxy(
    kind: Kind, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in BEHIND_A_PROXY.items():
        monkeypatch.setenv(name, value)
    assert call(kind, peer.target, "is_serving")


@both_clients
def test_what_is_no_token_is_refused_at_once(kind: Kind, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    for source, reason in (
        ({"token": ""}, "token holds no token"),
        ({"token": "two words"}, "expected printable ASCII"),
        ({"token_file": tmp_path / "empty"}, "empty holds no token"),
        ({"token_file": tmp_path / "missing"}, "No such file"),
        ({"token": "one", "token_file": tmp_path / "empty"}, "give one of them"),
    ):
        with pytest.raises(ValueError, match=reason):
            kind("127.0.0.1:8500", **source)


@both_clients
@pytest.mark.parametrize("name", ["predict", "watch_evaluations"])
def test_a_caller_that_is_not_admitted_is_told_so_at_once(kind: Kind, name: str, peer: Peer) -> None:
    peer.script.failures.append(Failure(code=grpc.StatusCode.UNAUTHENTICATED, message="no token came"))
    with pytest.raises(
        UnauthenticatedError, match=r"no token came \(token_file= of the clients, --token-file of the commands\)"
    ):
        call(kind, peer.target, name)
    peer.script.failures.append(Failure(code=grpc.StatusCode.PERMISSION_DENIED, message="not in the group predict"))
    with pytest.raises(PermissionDeniedError, match=r"^not in the group predict$"):
        call(kind, peer.target, name)


class Details(NamedTuple):
    method: str
    timeout: float | None
    metadata: Any
    credentials: Any
    wait_for_ready: bool | None
    compression: Any


def trace(_: object, continuation: Any, details: Any, request: Any) -> Any:
    """Add an entry of metadata to a call."""
    traced = (*(details.metadata or ()), ("traced", "yes"))
    kept = (details.credentials, details.wait_for_ready, details.compression)
    return continuation(Details(details.method, details.timeout, traced, *kept), request)


async def trace_async(_: object, continuation: Any, details: Any, request: Any) -> Any:
    """Add an entry of metadata to a call of grpc.aio."""
    traced = aio.Metadata(*(details.metadata or ()), ("traced", "yes"))
    return await continuation(details._replace(metadata=traced), request)


def tracing(kind: Kind) -> list[Any]:
    """Return interceptors of every kind of call, that add an entry of metadata."""
    kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
    names = ["UnaryUnary", "UnaryStream", "StreamUnary", "StreamStream"]
    module, function = (grpc, trace) if kind is Client else (aio, trace_async)
    bases = [getattr(module, f"{name}ClientInterceptor") for name in names]
    return [
        type("Tracing", (base,), {f"intercept_{each}": function})() for base, each in zip(bases, kinds, strict=True)
    ]


@both_clients
@pytest.mark.parametrize("name", sorted(CALLS.keys() - {"is_serving"}))
def test_interceptors_are_around_every_call(kind: Kind, name: str, recording_peer: Peer) -> None:
    call(kind, recording_peer.target, name, interceptors=tracing(kind))
    assert recording_peer.script.metadata
    assert {sent["traced"] for _, sent in recording_peer.script.metadata} == {"yes"}


@both_clients
def test_streams_behind_interceptors_keep_their_order_and_their_errors(kind: Kind, peer: Peer) -> None:
    items = [np.full((1, 4), value, np.float32) for value in range(50)]
    if kind is Client:
        with Client(peer.target, interceptors=tracing(kind)) as client:
            results: list[Any] = list(client.predict_many(items, in_flight=4))
            (refused,) = client.predict_many([{"picture": ROWS}])
            with pytest.raises(UnimplementedError):
                client.compare([], versions=[1, 2])
    else:

        async def run() -> tuple[list[Any], Any]:
            async with AsyncClient(peer.target, interceptors=tracing(kind)) as client:
                results = [result async for result in client.predict_many(items, in_flight=4)]
                (refused,) = [result async for result in client.predict_many([{"picture": ROWS}])]
                with pytest.raises(UnimplementedError):
                    await client.compare([], versions=[1, 2])
                return results, refused

        results, refused = asyncio.run(run())
    assert [result.output[0, 0] for result in results] == [2 * value for value in range(50)]
    assert str(refused) == "got picture; expected image"


@both_clients
def test_channel_options_replace_those_of_the_client(kind: Kind, peer: Peer) -> None:
    call(kind, peer.target, "status", options=[("grpc.primary_user_agent", "mine")])
    ((_, sent),) = peer.script.metadata
    assert sent["user-agent"].startswith("mine grpc-python")
    with pytest.raises(MessageTooLargeError):
        call(kind, peer.target, "predict", options=[("grpc.max_receive_message_length", 10)])


@both_clients
def test_a_call_waits_for_a_server_until_its_deadline_if_told_to(kind: Kind) -> None:
    with Peer() as gone:
        target = gone.target
    with pytest.raises(UnavailableError):
        call(kind, target, "status", {"timeout_seconds": SECONDS})
    with pytest.raises(DeadlineExceededError):
        call(kind, target, "status", {"timeout_seconds": 0.3, "wait_for_ready": True})
