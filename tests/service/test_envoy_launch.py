"""What is settled before a process becomes Envoy, and what it finds there."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from understudy.service.envoy.launch import configuration, reserve
from understudy.service.envoy.program import VARIABLE, Program
from understudy.service.errors import PortInUseError

SECONDS = 60


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_a_free_port_is_kept_from_others(host: str) -> None:
    with reserve(host, 0) as reserved:
        port = reserved.getsockname()[1]
        assert port != 0
        with pytest.raises(PortInUseError, match=f"{host}:{port}.*--grpc-port"):
            reserve(host, port)


def test_a_port_that_is_kept_can_be_listened_on_by_who_shares_it() -> None:
    with reserve("127.0.0.1", 0) as reserved, socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(reserved.getsockname())
        listener.listen()
        with socket.create_connection(reserved.getsockname(), timeout=5):
            listener.accept()[0].close()


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_that_is_not_this_machines_is_refused(host: str) -> None:
    with pytest.raises(PortInUseError, match=host):
        reserve(host, 0)


def test_streams_and_connections_may_be_silent_for_ever(tmp_path: Path) -> None:
    pytest.importorskip("pyvoy", reason="there is no wheel for this machine")
    config = configuration("127.0.0.1", 8500, tmp_path / "admin.sock")
    (listener,) = config["static_resources"]["listeners"]
    (manager,) = listener["filter_chains"][0]["filters"]
    connections = manager["typed_config"]
    assert connections["stream_idle_timeout"] == "0s"
    assert connections["common_http_protocol_options"]["idle_timeout"] == "0s"
    assert json.dumps(config)


def run_again(script: Path, *arguments: str, source: str) -> subprocess.CompletedProcess[str]:
    """Run a script as it is run inside Envoy, but without Envoy."""
    script.write_text(source)
    program = Program(
        module=None,
        arguments=[str(script), *arguments],
        executable=sys.executable,
        replaced={"LD_PRELOAD": None, "A": "before"},
        port=1,
        folder=str(script.parent / "own"),
    )
    Path(program.folder).mkdir(exist_ok=True)
    again = "from understudy.service.envoy.program import Program; Program.taken_along().run_to_the_end()"
    return subprocess.run(
        [sys.executable, "-c", again],
        env={**os.environ, VARIABLE: program.to_text(), "LD_PRELOAD": "", "A": "meanwhile"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def test_a_program_runs_again_with_its_arguments_its_environment_and_its_exit_status(tmp_path: Path) -> None:
    source = "import os, sys; print(sys.argv[1:], os.environ.get('LD_PRELOAD'), os.environ['A']); sys.exit(7)"
    ended = run_again(tmp_path / "script.py", "one", "two", source=source)
    assert (ended.returncode, ended.stdout) == (7, "['one', 'two'] None before\n"), ended.stderr
    assert not (tmp_path / "own").exists()


@pytest.mark.parametrize(
    ("source", "words"),
    [("raise OSError('broken')", "OSError: broken"), ("import sys; sys.exit('cannot')", "cannot")],
)
def test_a_program_that_fails_says_why(tmp_path: Path, source: str, words: str) -> None:
    ended = run_again(tmp_path / "script.py", source=source)
    assert ended.returncode == 1
    assert words in ended.stderr
