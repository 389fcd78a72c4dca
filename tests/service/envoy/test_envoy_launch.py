"""What is settled before a process becomes Envoy, and what it finds there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import trustme

from testkit.certificates import Credentials
from testkit.front_ends import needs_envoy
from understudy.evaluator.temporary_folders import delete_abandoned
from understudy.service.envoy.launch import (
    VARIABLE,
    ReexecState,
    configuration,
    forwarding,
    transport_socket,
    write_secrets,
)
from understudy.service.settings import ServeSettings
from understudy.service.tls import Certificates, TlsFiles

SECONDS = 60


def test_streams_may_be_silent_for_ever_and_connections_may_not(tmp_path: Path) -> None:
    pytest.importorskip("pyvoy", reason="there is no wheel for this machine")
    limits = ServeSettings(run_dir=tmp_path, max_connection_age_seconds=60.0, max_connections=100).connections
    config = configuration("127.0.0.1", 8500, tmp_path, None, limits)
    (listener,) = config["static_resources"]["listeners"]
    (manager,) = listener["filter_chains"][0]["filters"]
    connections = manager["typed_config"]
    assert connections["stream_idle_timeout"] == "0s"
    assert connections["forward_client_cert_details"] == "SANITIZE"
    assert connections["common_http_protocol_options"] == {
        "idle_timeout": "300.000s",
        "max_headers_count": 16_384,
        "max_connection_duration": "60.000s",
        "max_connection_duration_jitter": {"value": 10},
    }
    (monitor,) = config["overload_manager"]["resource_monitors"]
    assert monitor["typed_config"]["max_active_downstream_connections"] == 100
    assert json.dumps(config)


def test_tls_begins_with_1_2_and_requires_certificates_only_if_there_is_an_authority(tmp_path: Path) -> None:
    mine = Credentials(tmp_path, trustme.CA(), "127.0.0.1")
    for client_ca, requires in ((None, True), (mine.ca, True), (mine.ca, False)):
        files = TlsFiles(certificate=mine.certificate, key=mine.key, client_ca=client_ca, requires_client=requires)
        socket = transport_socket(tmp_path, Certificates.read(files))["typed_config"]
        assert socket["common_tls_context"]["tls_params"]["tls_minimum_protocol_version"] == "TLSv1_2"
        assert socket["require_client_certificate"] == (client_ca is not None and requires)
        context = socket["common_tls_context"]
        assert ("validation_context_sds_secret_config" in context) == (client_ca is not None)


def test_envoy_removes_the_certificate_that_a_caller_claims_to_have(tmp_path: Path) -> None:
    mine = Credentials(tmp_path, trustme.CA(), "127.0.0.1")
    for client_ca, done in ((None, "SANITIZE"), (mine.ca, "SANITIZE_SET")):
        files = TlsFiles(certificate=mine.certificate, key=mine.key, client_ca=client_ca)
        assert forwarding(Certificates.read(files))["forward_client_cert_details"] == done


def test_only_this_user_can_read_the_key_that_envoy_is_given(tmp_path: Path) -> None:
    mine = Credentials(tmp_path / "own", trustme.CA(), "127.0.0.1")
    files = TlsFiles(certificate=mine.certificate, key=mine.key, client_ca=None)
    (tmp_path / "envoy").mkdir()
    for _ in range(2):
        write_secrets(tmp_path / "envoy", Certificates.read(files))
        (file,) = (tmp_path / "envoy").iterdir()
        assert file.stat().st_mode & 0o077 == 0


IN_ENVOY = """
import sys, threading
from pathlib import Path
from understudy.service.envoy import envoy_server
from understudy.service.envoy.launch import exec_envoy
from understudy.service.settings import ServeSettings

host = envoy_server.current()
if host is None:
    files = dict(zip(("tls_cert", "tls_key"), map(Path, sys.argv[1:])))
    exec_envoy(ServeSettings(run_dir=Path("run"), grpc_port=0, **files))
print(host.launched.folder, flush=True)
threading.Event().wait()
"""


@needs_envoy
def test_the_key_that_a_killed_envoy_leaves_is_deleted_by_the_next_start(tmp_path: Path) -> None:
    mine = Credentials(tmp_path / "own", trustme.CA(), "127.0.0.1")
    script = tmp_path / "script.py"
    script.write_text(IN_ENVOY)
    command = [sys.executable, str(script), str(mine.certificate), str(mine.key)]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        delete_abandoned()
        assert (folder / "server.json").is_file()  # the lock has outlived the change into Envoy
        process.kill()
        process.wait(SECONDS)
    assert (folder / "server.json").is_file()
    delete_abandoned()
    assert not folder.exists()


def run_again(script: Path, *arguments: str, source: str) -> subprocess.CompletedProcess[str]:
    """Run a script as it is run inside Envoy, but without Envoy."""
    script.write_text(source)
    program = ReexecState(
        module=None,
        arguments=[str(script), *arguments],
        executable=sys.executable,
        replaced={"LD_PRELOAD": None, "A": "before"},
        port=1,
        folder=str(script.parent / "own"),
    )
    Path(program.folder).mkdir(exist_ok=True)
    again = "from understudy.service.envoy.launch import ReexecState; ReexecState.restore().run_and_exit()"
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


def test_what_a_program_has_registered_for_its_end_runs_and_cannot_change_its_exit_status(tmp_path: Path) -> None:
    source = "import atexit, sys; atexit.register(print, 'saved'); atexit.register(sys.exit, 3); sys.exit(7)"
    ended = run_again(tmp_path / "script.py", source=source)
    assert (ended.returncode, ended.stdout) == (7, "saved\n"), ended.stderr


@pytest.mark.parametrize(
    ("source", "words"),
    [("raise OSError('broken')", "OSError: broken"), ("import sys; sys.exit('cannot')", "cannot")],
)
def test_a_program_that_fails_says_why(tmp_path: Path, source: str, words: str) -> None:
    ended = run_again(tmp_path / "script.py", source=source)
    assert ended.returncode == 1
    assert words in ended.stderr
