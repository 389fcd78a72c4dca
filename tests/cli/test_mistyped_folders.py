"""Commands that read a folder of this machine, given one that does not exist."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from understudy.cli.main import main

SECONDS = 60


@pytest.mark.parametrize(
    "arguments",
    [
        ("events", "list", "--state-dir=mistyped"),
        ("export", "--output=out.keras", "--run-dir=mistyped"),
        ("export", "--output=out.keras", "--checkpoints=mistyped"),
        ("evaluate", "data.npz", "--run-dir=mistyped"),
        ("predict", "data.npz", "--output=out", "--run-dir=mistyped"),
        ("tune", "--eval-data=test=data.npz", "--output=out.toml", "--run-dir=mistyped"),
        ("replay", "--version=serving", "mistyped"),
    ],
    ids=" ".join,
)
def test_a_mistyped_folder_is_named_and_nothing_is_created(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data.npz").touch()
    monkeypatch.chdir(tmp_path)

    result = CliRunner().invoke(main, [*arguments])

    assert result.exit_code in (1, 2)
    assert "mistyped" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["data.npz"]


@pytest.mark.usefixtures("quick_starts")
def test_publish_names_a_folder_that_the_trainer_may_still_create_and_creates_nothing(tmp_path: Path) -> None:
    with _publishing(tmp_path, "mistyped") as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "mistyped does not exist; waiting until the trainer begins\n"
        assert process.poll() is None
        process.terminate()
        assert process.wait(SECONDS) == 0
        assert not process.stderr.read()
    assert not [*tmp_path.iterdir()]


@pytest.mark.usefixtures("quick_starts")
def test_publish_names_a_folder_that_is_no_run_yet_and_writes_nothing_into_it(tmp_path: Path) -> None:
    files = [tmp_path / "home" / name for name in ("checkpoints/model.keras", "digits.npz")]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    with _publishing(tmp_path, "home") as process:
        assert process.stderr is not None
        assert process.stderr.readline() == (
            "home holds neither training.json nor a checkpoint of a run; waiting until the trainer begins\n"
        )
        assert process.poll() is None
        process.terminate()
        assert process.wait(SECONDS) == 0
        assert not process.stderr.read()
    assert [path for path in sorted(tmp_path.rglob("*")) if path.is_file()] == files


@contextmanager
def _publishing(folder: Path, run_dir: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "understudy.cli", "publish", "--to=s3://bucket/run", f"--run-dir={run_dir}"]
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()
