from __future__ import annotations

from pathlib import Path

import pytest

from testkit.training_harness import STEPS, Linear, assert_bit_equal, run, state_of
from understudy.trainer import TrainSettings
from understudy.trainer.tensorboard_files import FOLDER


def profiles_of(run_dir: Path) -> list[Path]:
    return sorted((run_dir / FOLDER).glob("plugins/profile/*/*.xplane.pb"))


def test_a_profile_of_some_steps_is_written_and_changes_no_number(tmp_path: Path) -> None:
    run(Linear(), tmp_path / "plain")
    run(Linear(), tmp_path / "profiled", profile_steps="2,4")
    assert_bit_equal(state_of(tmp_path / "plain", STEPS), state_of(tmp_path / "profiled", STEPS))
    assert profiles_of(tmp_path / "plain") == []
    (profile,) = profiles_of(tmp_path / "profiled")
    content = profile.read_bytes()
    assert b"MatMul" in content
    assert content.count(b"IteratorGetNext") > 0


def test_a_training_that_is_past_the_steps_writes_none_and_one_in_their_midst_the_rest(tmp_path: Path) -> None:
    run(Linear(), tmp_path, steps=5, checkpoint_every=4)
    run(Linear(), tmp_path, steps=7, profile_steps="2,4")
    assert profiles_of(tmp_path) == []
    run(Linear(), tmp_path, steps=9, profile_steps="4,8")
    assert len(profiles_of(tmp_path)) == 1


@pytest.mark.parametrize("text", ["5", "5,", "a,b", "0,3", "4,3", "3,11"])
def test_steps_that_are_none_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"^profile_steps is .*give two steps from 1 to 10"):
        TrainSettings(run_dir=tmp_path, steps=10, profile_steps=text)


def test_a_chief_that_does_not_train_is_not_profiled(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^profile_steps is of a chief that trains"):
        TrainSettings(run_dir=tmp_path, steps=10, profile_steps="1,2", strategy="parameter_server")
