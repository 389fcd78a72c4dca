"""What is said when an evaluator is built from what a command line says."""

from __future__ import annotations

from pathlib import Path

import pytest

from testkit.real_run import WAIT_SECONDS, step_model
from understudy.checkpoints import LockHeldError
from understudy.evaluator.evaluator import Evaluator
from understudy.evaluator.evaluator_errors import ConfigurationError
from understudy.evaluator.factory import create_evaluator
from understudy.evaluator.observer import SilentObserver
from understudy.evaluator.settings import CheckpointLocation, EvaluatorSettings
from understudy.service.settings import ServeSettings

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


def test_a_second_service_on_one_foreign_folder_is_refused_with_the_flag_and_takes_nothing_from_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = tmp_path / "theirs"
    folder.mkdir()
    for step in (1, 2):
        step_model(step).save(folder / f"model-{step}.keras")

    def create(state_dir: Path | None = None) -> Evaluator:
        settings = ServeSettings(checkpoints=folder, state_dir=state_dir)
        evaluator = EvaluatorSettings(state_dir=settings.evaluator_state_dir, devices=("CPU:0",))
        return create_evaluator(settings.location, evaluator, SilentObserver()).evaluator

    with create() as first:
        assert first.wait_ready(WAIT_SECONDS)
        half = ServeSettings(checkpoints=folder).evaluator_state_dir / "staging" / ".tmp-half"
        half.touch()  # what the first one copies just now
        with pytest.raises(LockHeldError, match=r"in use by process \d+ on .+ --state-dir \(or UNDERSTUDY_STATE_DIR\)"):
            create().start()
        assert half.exists()
        with create(tmp_path / "own") as second:
            assert second.wait_ready(WAIT_SECONDS)


@pytest.mark.parametrize(
    ("mode", "installed", "message"),
    [
        (
            "",
            "ray",
            "is used only with a token; set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH here and on the cluster",
        ),
        ("token", None, r"needs Ray; install the extra \[ray\]"),
    ],
)
def test_a_cluster_that_cannot_be_used_is_refused_at_the_start(
    mode: str, installed: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: installed)
    settings = EvaluatorSettings(state_dir=tmp_path, cluster="127.0.0.1:6379")
    with pytest.raises(ConfigurationError, match=message):
        create_evaluator(CheckpointLocation(folder=tmp_path, is_run=True), settings, SilentObserver())
