from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from understudy.cli.supervisor import Supervisor


def command(journal: Path, then: str) -> list[str]:
    """Return a command that notes that it was started, and then does something."""
    script = f"import os, signal, sys, time; open({str(journal)!r}, 'a').write('started\\n'); {then}"
    return [sys.executable, "-c", script]


@pytest.mark.parametrize(
    ("then", "status"),
    [
        ("sys.exit(4)", 4),
        ("sys.exit(7)", 7),
        ("sys.exit(143)", 143),
        ("os.kill(os.getpid(), signal.SIGKILL)", 128 + 9),
        ("os.kill(os.getpid(), signal.SIGALRM)", 128 + 14),
    ],
)
def test_what_another_start_can_mend_is_started_again(tmp_path: Path, then: str, status: int) -> None:
    journal = tmp_path / "journal"
    assert Supervisor(command(journal, then), restarts=1).run() == status
    assert journal.read_text().count("started") == 2


@pytest.mark.parametrize("status", [0, 1, 2, 3, 6])
def test_what_another_start_cannot_mend_is_final(tmp_path: Path, status: int) -> None:
    journal = tmp_path / "journal"
    assert Supervisor(command(journal, f"sys.exit({status})"), restarts=1).run() == status
    assert journal.read_text().count("started") == 1


def test_sigterm_to_the_supervisor_goes_on_to_the_task_which_is_not_started_again(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    over = threading.Event()

    def terminate_once_started() -> None:
        while not journal.exists() and not over.wait(0.01):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=terminate_once_started)
    sender.start()
    try:
        assert Supervisor(command(journal, "time.sleep(60)"), restarts=3).run() == 128 + signal.SIGTERM
    finally:
        over.set()
        sender.join()
    assert journal.read_text().count("started") == 1
