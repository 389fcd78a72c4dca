"""The demo, as a newcomer runs it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from testkit.ports import BEHIND_A_PROXY
from testkit.preloading import preloaded
from understudy.checkpoints import RunDir
from understudy.clients import Client

pytestmark = pytest.mark.long

_SECONDS = 240

_INTERVAL = r"\d\.\d{4} \[\d\.\d{4}, \d\.\d{4}\]\n"
_HEADING = r"  slice +examples +accuracy with its 95% interval\n"
_SLICES = rf"{_HEADING}  all +300 +{_INTERVAL}(?:  label=\d +\d+ +{_INTERVAL})+"
_UNDECIDED = r"step \d+ is undecided, and served: test/accuracy is .* the improvement is between .* at 95%"


def _demo(*arguments: str, **variables: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "TF_CONFIG"}
    completed = subprocess.run(
        [sys.executable, "-m", "understudy.cli", "demo", *arguments],
        env={**environment, **preloaded(), **BEHIND_A_PROXY, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout


@pytest.fixture
def kept() -> Iterator[list[psutil.Process]]:
    """Processes to end with the test."""
    processes: list[psutil.Process] = []
    yield processes
    for process in processes:
        process.kill()


@pytest.mark.timeout(_SECONDS)
def test_the_demo_trains_scores_swaps_and_leaves_the_service_if_asked(
    kept: list[psutil.Process], tmp_path: Path
) -> None:
    opened = tmp_path / "opened"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}\n', encoding="utf-8")
    browser.chmod(0o755)
    story = _demo("--keep", "--open", BROWSER=f"{browser} %s")
    pid = re.search(r"kill (\d+)", story)
    target = re.search(r"status --target (\S+)", story)
    assert pid
    assert target
    service = psutil.Process(int(pid[1]))
    kept.append(service)

    assert "10 checkpoints were scored while predictions flowed" in story
    (folder,) = re.findall(r"files are in (\S+)", story)
    kept_steps = RunDir(Path(folder) / "run").committed_steps()
    assert kept_steps == list(range(30, 301, 30)), "an evaluator that is slower than the training finds them all"
    assert "0 failed" in story
    assert len(re.findall(_UNDECIDED, story)) == 1
    (slices,) = re.findall(_SLICES, story)
    assert slices.count("\n") == 4, "with the undecided gate these are five lines"
    shown = story.index(f"shows what it does at {opened.read_text().strip()}")
    assert shown < story.index("worker 0")
    with Client(target[1]) as client:
        assert client.status().serving_step == 300
    service.send_signal(signal.SIGTERM)
    psutil.wait_procs([service], timeout=30)
    assert not service.is_running()
    kept.clear()


@pytest.mark.timeout(_SECONDS)
def test_the_demo_serves_what_a_plain_keras_script_writes() -> None:
    story = _demo("--script")
    assert "8 checkpoints were scored while predictions flowed" in story
    assert "0 failed" in story
