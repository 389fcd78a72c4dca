"""How ``understudy serve`` tells why it ended. The service itself is tested in tests/integration."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from testkit.front_ends import FRONT_ENDS
from understudy.cli.main import main
from understudy.evaluator.evaluation.training_end import ExitReason, ServiceExit
from understudy.service import server
from understudy.service.settings import ServeSettings


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        (ExitReason.FINISHED, 0),
        (ExitReason.FAILED, 5),
        (ExitReason.TIMED_OUT, 6),
        (ExitReason.DEVICE_FAILED, 8),
    ],
)
def test_the_exit_status_says_how_it_ended(
    ending: ExitReason, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "serve", lambda *_: ServiceExit(reason=ending, message="it is over"))
    ended = CliRunner().invoke(main, ["serve", "--run-dir", str(tmp_path), "--exit-when-finished"])
    assert ended.exit_code == status
    assert ended.stderr == ("Error: it is over\n" if status else "")


def test_a_signal_before_the_end_of_training_is_no_success_where_that_end_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a job whose evaluator is evicted from its node would count as done."""
    monkeypatch.setattr(server, "serve", lambda *_: ServiceExit(reason=ExitReason.SIGNALLED))
    command = ["serve", "--run-dir", str(tmp_path)]
    assert CliRunner().invoke(main, command).exit_code == 0
    ended = CliRunner().invoke(main, [*command, "--exit-when-finished"])
    assert ended.exit_code == 143
    assert ended.stderr == "Error: stopped before training had finished and was evaluated\n"


def test_ending_by_itself_needs_a_run_folder(tmp_path: Path) -> None:
    ended = CliRunner().invoke(main, ["serve", "--checkpoints", str(tmp_path), "--exit-when-finished"])
    assert ended.exit_code == 2
    assert "--exit-when-finished" in ended.stderr


def test_serving_other_machines_without_tls_is_a_decision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def serve(settings: ServeSettings, _: object) -> ServiceExit:
        started.append(settings.host)
        return ServiceExit(reason=ExitReason.SIGNALLED)

    monkeypatch.setattr(server, "serve", serve)
    command = ["serve", "--run-dir", str(tmp_path)]
    image: dict[str, str | None] = {"UNDERSTUDY_HOST": "0.0.0.0"}  # noqa: S104 - none is bound
    refused = CliRunner().invoke(main, command, env=image)
    assert refused.exit_code == 2
    assert "--tls-cert and --tls-key, or --insecure" in " ".join(refused.stderr.split())
    assert not started
    assert CliRunner().invoke(main, [*command, "--insecure"], env=image).exit_code == 0
    assert CliRunner().invoke(main, command, env={**image, "UNDERSTUDY_INSECURE": "true"}).exit_code == 0
    assert CliRunner().invoke(main, [*command, "--tls-cert", "a", "--tls-key", "b"], env=image).exit_code == 0
    assert len(started) == 3


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_certificates_that_cannot_be_used_end_the_start_at_once(front_end: str, tmp_path: Path) -> None:
    files = ["--tls-cert", str(tmp_path / "tls.crt"), "--tls-key", str(tmp_path / "tls.key")]
    command = [sys.executable, "-m", "understudy.cli", "serve", "--run-dir", str(tmp_path), "--frontend", front_end]
    ended = subprocess.run([*command, *files], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"Error: --tls-cert {tmp_path / 'tls.crt'} cannot be read (No such file")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["serve", "--run-dir", "unused", "--eval-data", "test=none.npz"],
            "dataset 'test': there is no file none.npz; it has to be there at the start",
        ),
        (["serve", "--run-dir", "unused", "--experiment", "none.py:Own"], "'none.py:Own': there is no file"),
        (["train", "none.py:Own", "--run-dir", "unused", "--steps", "1"], "'none.py:Own': there is no file"),
    ],
)
def test_a_missing_file_is_named_before_tensorflow_starts(arguments: list[str], message: str, tmp_path: Path) -> None:
    script = (
        "import sys; from understudy.cli.main import main\n"
        f"try: main({arguments})\nfinally: assert 'tensorflow' not in sys.modules"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"Error: {message}")
    assert ended.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
