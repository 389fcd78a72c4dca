"""`understudy tune` over real servers: what it writes, and that it leaves nothing behind when it is ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import psutil
import pytest
from click.testing import CliRunner

from testkit.checkpoints import OUTPUTS, Chief, ones
from testkit.in_process import until
from testkit.preloading import preloaded
from understudy.cli.main import main

PATIENCE_SECONDS = 280


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the command for a tiny model."""
    folder = tmp_path_factory.mktemp("tune")
    Chief(folder / "run").publish(3)
    examples = folder / "test.npz"
    np.savez(examples, x=ones(8), targets=np.full((8, OUTPUTS), 3, np.float32))
    data = ("--run-dir", str(folder / "run"), "--eval-data", f"test={examples}", "--connections", "2")
    return [sys.executable, "-m", "understudy.cli", "tune", *data, "--turn-seconds", "0.1"]


def children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def test_a_search_ends_with_its_budget_and_writes_a_settings_file(command: list[str], tmp_path: Path) -> None:
    output = tmp_path / "tuned.toml"
    options = ["--budget-seconds", "1", "--json", "--output", str(output)]
    ran = subprocess.run(
        [*command, *options],
        env={**os.environ, **preloaded()},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )

    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    settings = tomllib.loads(output.read_text(encoding="utf-8"))["serve"]
    assert settings == found["settings"]
    assert all(trial["outcome"] in ("taken", "no gain", "out of time") for trial in found["trials"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--run-dir", "none"), "there is no folder none"),
        (("--checkpoints", "none"), "there is no folder none"),
        (("--run-dir", "none", "--experiment", "none.py:Own"), "there is no file"),
    ],
)
def test_a_search_without_checkpoints_ends_at_once(arguments: tuple[str, ...], said: str) -> None:
    given = ("--experiment", "digits", *arguments)
    ended = CliRunner().invoke(main, ["tune", *given])
    assert ended.exit_code == 1
    assert said in ended.stderr


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_a_search_that_is_ended_leaves_no_process_and_no_file(
    command: list[str], tmp_path: Path, number: signal.Signals, status: int
) -> None:
    output = tmp_path / "tuned.toml"
    process = subprocess.Popen([*command, "--output", str(output)], text=True, stderr=subprocess.PIPE)
    try:
        until(lambda: bool(children(process)))
        left = children(process)
        process.send_signal(number)
        assert process.wait(PATIENCE_SECONDS) == status
    finally:
        process.kill()
        process.communicate()

    _, alive = psutil.wait_procs(left, timeout=PATIENCE_SECONDS)
    assert not alive
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_exists_is_not_replaced(command: list[str], tmp_path: Path) -> None:
    output = tmp_path / "mine.toml"
    output.write_text("mine", encoding="utf-8")
    ran = subprocess.run(
        [*command, "--output", str(output)], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )

    assert ran.returncode == 1
    assert "exists; give another file" in ran.stderr
    assert output.read_text(encoding="utf-8") == "mine"
