"""The client's commands over TLS, and with tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
import trustme
from click.testing import CliRunner, Result

from testkit.certificates import Credentials
from testkit.peer_server import STEP, Failure, Peer
from understudy.cli.main import main

Ask = Callable[..., Result]


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def own(authority: trustme.CA, tmp_path: Path) -> Credentials:
    return Credentials(tmp_path / "own", authority, "caller")


@pytest.fixture
def peer(authority: trustme.CA, tmp_path: Path) -> Iterator[Peer]:
    """A server for ``models.example.org`` that requires certificates."""
    server = Credentials(tmp_path / "server", authority, "models.example.org")
    pair = (server.key.read_bytes(), server.certificate.read_bytes())
    credentials = grpc.ssl_server_credentials([pair], server.ca.read_bytes(), require_client_auth=True)
    with Peer(credentials=credentials) as running:
        running.script.record(STEP)
        yield running


@pytest.fixture
def ask(peer: Peer, own: Credentials) -> Ask:
    """Run a command, with all settings of TLS in the environment; ``without`` some of them."""

    def invoke(*arguments: str, without: tuple[str, ...] = ()) -> Result:
        env: dict[str, str | None] = {
            "UNDERSTUDY_TARGET": peer.target,
            "UNDERSTUDY_TIMEOUT_SECONDS": "15",
            "UNDERSTUDY_TLS_CA": str(own.ca),
            "UNDERSTUDY_TLS_CERT": str(own.certificate),
            "UNDERSTUDY_TLS_KEY": str(own.key),
            "UNDERSTUDY_TLS_SERVER_NAME": "models.example.org",
        }
        kept = {name: value for name, value in env.items() if name.removeprefix("UNDERSTUDY_") not in without}
        return CliRunner().invoke(main, arguments, env=kept)

    return invoke


def test_commands_call_over_tls(ask: Ask, tmp_path: Path) -> None:
    file = tmp_path / "rows.npy"
    np.save(file, np.ones((2, 4), np.float32))

    status = ask("status", "--json")
    predicted = ask("predict", str(file), "--json")
    listed = ask("evaluations", "--format", "json")
    healthy = ask("health")

    assert json.loads(status.stdout)["serving_step"] == STEP, status.stderr
    assert json.loads(predicted.stdout)["step"] == STEP, predicted.stderr
    assert listed.exit_code == 0, listed.stderr
    assert healthy.stdout == "SERVING\n", healthy.stderr


def test_several_servers_share_one_name(ask: Ask, peer: Peer) -> None:
    assert ask("status", "--target", f"{peer.target},{peer.target}").exit_code == 0


@pytest.mark.parametrize(
    ("without", "reason"),
    [
        (("TLS_CA", "TLS_CERT", "TLS_KEY", "TLS_SERVER_NAME"), "and --tls-ca that it has TLS"),
        (("TLS_CERT", "TLS_KEY"), "--target says whom to ask)"),
        (("TLS_SERVER_NAME",), "Hostname Verification Check failed"),
    ],
)
def test_a_refused_connection_is_reported_in_one_line(ask: Ask, without: tuple[str, ...], reason: str) -> None:
    refused = ask("status", without=without)
    assert refused.exit_code == 1
    assert reason in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_settings_that_do_not_fit_are_usage_errors(ask: Ask, own: Credentials, tmp_path: Path) -> None:
    missing, text = str(tmp_path / "missing"), tmp_path / "text"
    text.write_text("no certificate")
    other = Credentials(tmp_path / "other", trustme.CA(), "caller")
    for refused, reason in (
        (ask("status", without=("TLS_CA",)), "go with --tls-ca"),
        (ask("status", without=("TLS_KEY",)), "--tls-cert and --tls-key go together"),
        (ask("status", "--tls-ca", missing), f"'--tls-ca': {missing} cannot be used: No such file"),
        (ask("status", "--tls-ca", str(text)), f"'--tls-ca': {text} cannot be used"),
        (ask("status", "--tls-key", str(other.key)), f"{own.certificate} cannot be used: KEY_VALUES_MISMATCH"),
    ):
        assert refused.exit_code == 2, refused.stderr
        assert reason in " ".join(refused.stderr.split())


@pytest.mark.parametrize(
    "arguments",
    [("status",), ("evaluations",), ("promote", "--unpin"), ("evaluate", "--dataset", "test")],
    ids=" ".join,
)
def test_commands_send_the_token_in_the_file(arguments: tuple[str, ...], ask: Ask, peer: Peer, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    asked = ask(*arguments, "--token-file", str(tmp_path / "token"))
    assert asked.exit_code == 0, asked.stderr
    assert {sent["authorization"] for _, sent in peer.script.metadata} == {"Bearer secret"}


def test_a_token_stays_on_this_machine_without_tls(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    token = {"UNDERSTUDY_TOKEN_FILE": str(tmp_path / "token"), "UNDERSTUDY_TIMEOUT_SECONDS": "5"}
    asked = CliRunner().invoke(main, ["status", "--target", "models.invalid:8500"], env=token)
    told_to = CliRunner().invoke(main, ["status", "--target", "models.invalid:8500", "--token-without-tls"], env=token)
    missing = ask("status", "--token-file", str(tmp_path / "missing"))

    assert (asked.exit_code, told_to.exit_code, missing.exit_code) == (2, 1, 2)
    assert "'--token-file': the token would be sent to models.invalid:8500" in " ".join(asked.stderr.split())
    assert "'--token-file': token_file" in " ".join(missing.stderr.split())


def test_a_caller_that_is_not_admitted_is_told_the_remedy(ask: Ask, peer: Peer) -> None:
    peer.script.failures.append(Failure(code=grpc.StatusCode.UNAUTHENTICATED, message="no token came"))
    refused = ask("status")
    assert refused.exit_code == 1
    assert refused.stderr == "Error: no token came (token_file= of the clients, --token-file of the commands)\n"
