"""What is said when an evaluator is built from what a command line says."""

from __future__ import annotations

from pathlib import Path

import pytest

from understudy.evaluator.factory import create_evaluator
from understudy.evaluator.observer import SilentObserver
from understudy.evaluator.settings import CheckpointLocation, EvaluatorSettings

pytestmark = pytest.mark.usefixtures("logical_cpus")


@pytest.mark.parametrize("is_run", [True, False])
def test_a_folder_that_may_be_mistyped_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, is_run: bool
) -> None:
    folder = tmp_path / "theirs"
    settings = EvaluatorSettings(state_dir=tmp_path / "state", devices=("CPU:0",))

    def said() -> list[str]:
        caplog.clear()
        create_evaluator(CheckpointLocation(folder=folder, is_run=is_run), settings, SilentObserver())
        return [record.message for record in caplog.records if record.name.endswith(".factory")]

    (warning,) = said()
    awaited = folder / "checkpoints" if is_run else folder
    assert warning == f"there is no folder {awaited}; waiting for it to appear"
    awaited.mkdir(parents=True)
    assert not said()
