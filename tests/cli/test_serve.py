"""How ``understudy serve`` tells why it ended. The service itself is tested in tests/integration."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from understudy.cli.main import main
from understudy.evaluator.evaluation.training_end import ExitReason, ServiceExit
from understudy.service import server


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        (ExitReason.SIGNALLED, 0),
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


def test_ending_by_itself_needs_a_run_folder(tmp_path: Path) -> None:
    ended = CliRunner().invoke(main, ["serve", "--checkpoints", str(tmp_path), "--exit-when-finished"])
    assert ended.exit_code == 2
    assert "--exit-when-finished" in ended.stderr
