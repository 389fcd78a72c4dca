"""``understudy health`` against a peer server."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from testkit.peer_server import Peer
from understudy.cli.main import main
from understudy.service.front_end import write_address_file

from .conftest import Run


def test_health_is_the_exit_status(run: Run, peer: Peer) -> None:
    healthy = run("health")
    peer.stop_serving()
    unhealthy = run("health")
    unknown = run("health", "--service", "understudy.v1.Nothing")

    assert (healthy.exit_code, healthy.stdout) == (0, "SERVING\n")
    assert (unhealthy.exit_code, unhealthy.stdout) == (1, "NOT_SERVING\n")
    assert unknown.exit_code == 1


def test_an_answer_that_cannot_be_written_is_said_in_one_line(peer: Peer) -> None:
    command = [sys.executable, "-m", "understudy.cli", "health", "--target", peer.target]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)

    assert (ended.returncode, ended.stderr) == (1, "Error: the output cannot be written: No space left on device\n")


def test_health_asks_the_server_that_wrote_the_address_file(peer: Peer, tmp_path: Path) -> None:
    port = peer.target.rpartition(":")[2]
    file = tmp_path / "address"
    write_address_file(file, f"grpc=0.0.0.0:{port} http=0.0.0.0:1")

    asked = CliRunner(env={"UNDERSTUDY_ADDRESS_FILE": str(file)}).invoke(main, ["health"])

    assert (asked.exit_code, asked.stdout) == (0, "SERVING\n"), asked.stderr


def test_health_goes_by_the_target_that_is_given(peer: Peer, tmp_path: Path) -> None:
    arguments = ["health", "--address-file", str(tmp_path / "none"), "--target", peer.target]
    assert CliRunner().invoke(main, arguments).exit_code == 0


@pytest.mark.parametrize("service", [[], ["--service", "understudy.v1.PredictionService"]])
def test_health_says_that_a_server_with_tls_does_not_answer(service: list[str], tmp_path: Path) -> None:
    file = tmp_path / "address"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    write_address_file(file, f"grpc=127.0.0.1:{port} http=[::]:{port}", tls=True)

    asked = CliRunner().invoke(main, ["health", "--address-file", str(file), "--timeout-seconds", "2", *service])

    assert asked.exit_code == 1
    assert f":{port}" in asked.stderr


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "the server does not listen yet"), ("LISTENING\n", "is no address file; expected")]
)
def test_health_says_what_is_wrong_with_the_address_file(content: str | None, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "address"
    if content is not None:
        file.write_text(content, encoding="ascii")

    asked = CliRunner().invoke(main, ["health", "--address-file", str(file)])

    assert asked.exit_code == 1
    assert reason in asked.stderr
