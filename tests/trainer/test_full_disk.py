"""A disk that is full, or a file that may not grow: the operating system refuses, and nothing is lost."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit.small_disk import fill, mounted
from testkit.training_harness import STEPS, Dense, Linear, run
from understudy.checkpoints import RunDir, read_training_status
from understudy.trainer import PublishError

pytestmark = pytest.mark.long

FIRST = 5


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk") as disk:
        yield disk


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a training with one checkpoint, for copies."""
    run_dir = tmp_path_factory.mktemp("begun")
    run(Dense(), run_dir, steps=FIRST)
    return run_dir


@pytest.fixture(scope="module")
def begun_linear(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of one with a smaller model, for copies."""
    run_dir = tmp_path_factory.mktemp("begun")
    run(Linear(), run_dir, steps=FIRST)
    return run_dir


def checkpoints(run_dir: Path) -> list[str]:
    return sorted(path.name for path in RunDir(run_dir).checkpoints.iterdir())


@pytest.mark.parametrize(("leave_kib", "tensorboard"), [(12, False), (48, False), (48, True)])
def test_a_disk_that_fills_while_a_checkpoint_is_written_costs_none_of_those_before(
    small_disk: Path, begun: Path, leave_kib: int, *, tensorboard: bool
) -> None:
    run_dir = small_disk / "run"
    if tensorboard:
        run(Dense(), run_dir, steps=FIRST, tensorboard=True)
    else:
        shutil.copytree(begun, run_dir)
    filler = fill(small_disk, leave=leave_kib << 10)

    with pytest.raises(PublishError, match=r"step 10 could not be published: .*No space left on device"):
        run(Dense(), run_dir, tensorboard=tensorboard)

    assert checkpoints(run_dir) == ["000000000005", "lock"]
    status = read_training_status(RunDir(run_dir), now=0.0)
    assert status is not None
    assert (status.state, status.reason.split(":")[0]) == ("failed", "PublishError")
    filler.unlink()
    assert run(Dense(), run_dir).first_step == FIRST
    assert RunDir(run_dir).committed_steps() == [FIRST, STEPS]


def test_on_a_disk_without_any_room_training_does_not_begin(small_disk: Path, begun_linear: Path) -> None:
    run_dir = small_disk / "run"
    shutil.copytree(begun_linear, run_dir)
    filler = fill(small_disk, leave=0)

    for _ in range(2):
        with pytest.raises(PublishError, match=r"run cannot be written to: .*No space left on device"):
            run(Linear(), run_dir)

    assert checkpoints(run_dir) == ["000000000005", "lock"]
    filler.unlink()
    assert run(Linear(), run_dir).first_step == FIRST


def test_a_file_that_may_not_grow_so_large_costs_no_checkpoint(tmp_path: Path, begun_linear: Path) -> None:
    shutil.copytree(begun_linear, tmp_path, dirs_exist_ok=True)
    model_file = RunDir(tmp_path).checkpoint(FIRST) / "model.keras"
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (model_file.stat().st_size // 2, hard))
    try:
        with pytest.raises(PublishError, match=r"step 10 could not be published: .*File too large"):
            run(Linear(), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

    assert checkpoints(tmp_path) == ["000000000005", "lock"]
    assert run(Linear(), tmp_path).first_step == FIRST
