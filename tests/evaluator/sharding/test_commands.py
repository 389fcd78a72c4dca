"""``understudy evaluate`` and ``predict`` with ``--run-dir``: without a server, and after the death of the command."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from understudy.cli.main import main

from .conftest import BATCH_SIZE, EXAMPLES, STEP, Case

PATIENCE_SECONDS = 200.0

pytestmark = pytest.mark.usefixtures("quick_starts")


def options(case: Case, *more: object) -> list[str]:
    (file,) = case.work.data.paths
    return [str(file), "--run-dir", str(case.run), "--version", "latest", "--workers", "2", *map(str, more)]


def test_evaluate_scores_a_run_without_a_server(case: Case) -> None:
    result = CliRunner().invoke(main, ["evaluate", *options(case, "--batch-size", BATCH_SIZE, "--json")])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["metrics"] == dict(case.score)
    assert (found["step"], found["examples"], found["batches"], found["notes"]) == (STEP, EXAMPLES, 26, [])


def test_predict_goes_on_after_the_command_was_killed(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, temporary = tmp_path / "out", tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    command = [sys.executable, "-m", "understudy.cli", "predict", *options(case, "--batch-size", 1, "--output", output)]
    process = subprocess.Popen(command)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not any(output.glob("outputs-*")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    process.kill()
    process.wait(PATIENCE_SECONDS)
    before = {path.name: path.stat().st_mtime_ns for path in output.glob("outputs-*")}
    assert 1 <= len(before) < 13
    assert not (output / "manifest.json").exists()
    assert list(temporary.glob("understudy-*/*"))

    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"wrote {EXAMPLES} examples of step {STEP} to 13 files in {output}\n"
    files = [file["name"] for file in json.loads((output / "manifest.json").read_bytes())["files"]]
    assert len(files) == 13
    assert not list(temporary.glob("understudy-*"))
    assert all((output / name).stat().st_mtime_ns == written for name, written in before.items())
    found = [dict(np.load(output / name)) for name in files]
    for name, expected in case.outputs.items():
        np.testing.assert_allclose(np.concatenate([each[name] for each in found]), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["evaluate", "FILE", "--workers", "2"], "--workers and --cluster go with --run-dir"),
        (["evaluate", "FILE", "FILE"], "Several FILES and folders go with --run-dir"),
        (["evaluate", "--dataset", "test", "--run-dir", "."], "--dataset is of a server"),
        (["evaluate", "FILE", "--run-dir", ".", "--version", "serving"], "there is no serving version"),
        (["predict", "FILE", "--run-dir", "."], "go with --output DIR"),
    ],
)
def test_what_does_not_go_together_is_a_usage_error(arguments: list[str], said: str, case: Case) -> None:
    (file,) = case.work.data.paths
    result = CliRunner().invoke(main, [str(file) if word == "FILE" else word for word in arguments])
    assert result.exit_code == 2
    assert said in result.stderr
