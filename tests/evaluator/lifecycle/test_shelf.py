from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from understudy.checkpoints import (
    CheckpointGoneError,
    CheckpointPublisher,
    DamagedCheckpointError,
    RunDir,
    RunSource,
)
from understudy.evaluator.errors import VersionNotFoundError
from understudy.evaluator.lifecycle.shelf import Shelf


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


@pytest.fixture
def shelf(run: RunDir) -> Shelf:
    return Shelf(RunSource(run), run.pinned)


def publish(run: RunDir, *steps: int, content: str = "model") -> None:
    publisher = CheckpointPublisher(run, keep=100)
    for step in steps:

        def write(folder: Path, text: str = f"{content} {step}") -> None:
            (folder / "model.keras").write_text(text)

        publisher.publish(step, write, epoch=None, final=False, metrics={}, signature=None)


def steps(shelf: Shelf) -> list[int]:
    return [info.step for info in shelf.checkpoints()]


def pinned(run: RunDir) -> list[str]:
    return sorted(folder.name for folder in run.pinned.iterdir())


def test_what_the_source_offers_is_on_the_shelf_in_step_order(run: RunDir, shelf: Shelf) -> None:
    publish(run, 10, 2)
    shelf.refresh()

    assert steps(shelf) == [2, 10]
    assert shelf.info(10).step == 10
    with pytest.raises(VersionNotFoundError, match=r"step 5; there are \[2, 10\]"):
        shelf.info(5)


def test_a_held_checkpoint_outlives_its_deletion(run: RunDir, shelf: Shelf) -> None:
    publish(run, 1)
    shelf.refresh()
    hold = shelf.hold(shelf.info(1))
    shutil.rmtree(run.checkpoint(1))
    shelf.refresh()

    assert hold.taken.model_file.read_text() == "model 1"
    assert steps(shelf) == [1]
    with shelf.hold(shelf.info(1)) as again:
        assert again.taken == hold.taken
    hold.release()
    assert steps(shelf) == []
    assert pinned(run) == []


def test_the_private_folder_goes_with_the_last_hold(run: RunDir, shelf: Shelf) -> None:
    publish(run, 1)
    shelf.refresh()
    first, second = shelf.hold(shelf.info(1)), shelf.hold(shelf.info(1))

    first.release()
    first.release()
    assert pinned(run) == ["000000000001"]
    second.release()
    assert pinned(run) == []
    assert steps(shelf) == [1]


def test_a_checkpoint_deleted_before_it_is_held_is_gone(run: RunDir, shelf: Shelf) -> None:
    publish(run, 1)
    shelf.refresh()
    shutil.rmtree(run.checkpoint(1))

    with pytest.raises(CheckpointGoneError):
        shelf.hold(shelf.info(1))
    shelf.refresh()
    assert steps(shelf) == []


def test_a_flipped_bit_is_found_when_it_is_verified(run: RunDir, shelf: Shelf) -> None:
    publish(run, 1)
    file = run.checkpoint(1) / "model.keras"
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    shelf.refresh()

    with shelf.hold(shelf.info(1)) as hold, pytest.raises(DamagedCheckpointError, match="SHA-256"):
        hold.verify()
    assert pinned(run) == []


def test_a_file_that_is_written_over_in_place_is_not_loaded_under_its_old_digest(run: RunDir, shelf: Shelf) -> None:
    publish(run, 1)
    shelf.refresh()
    with shelf.hold(shelf.info(1)) as hold:
        hold.verify()
        (run.checkpoint(1) / "model.keras").write_text("other 1")
        with pytest.raises(DamagedCheckpointError, match="SHA-256"):
            hold.verify()


def test_a_damaged_private_copy_is_made_again_where_the_original_is_whole(run: RunDir, shelf: Shelf) -> None:
    publish(run, 1)
    shelf.refresh()
    with shelf.hold(shelf.info(1)) as hold:
        hold.taken.model_file.unlink()
        hold.taken.model_file.write_text("other 1")
        hold.verify()
        assert hold.taken.model_file.read_text() == "model 1"


def test_what_an_earlier_process_held_is_on_the_shelf_again(run: RunDir, shelf: Shelf) -> None:
    publish(run, 1, 2)
    shelf.refresh()
    shelf.hold(shelf.info(1))
    shelf.hold(shelf.info(2))
    shutil.rmtree(run.checkpoint(1))

    restarted = Shelf(RunSource(run), run.pinned)
    restarted.refresh()

    assert steps(restarted) == [1, 2]
    with restarted.hold(restarted.info(1)) as hold:
        assert hold.taken.model_file.read_text() == "model 1"
        restarted.discard_leftovers()
        assert pinned(run) == ["000000000001"]
    assert steps(restarted) == [2]
    assert pinned(run) == []


def test_a_damaged_leftover_is_deleted(run: RunDir, shelf: Shelf, caplog: pytest.LogCaptureFixture) -> None:
    publish(run, 1)
    shelf.refresh()
    shelf.hold(shelf.info(1))
    (run.pinned / "000000000001" / "manifest.json").write_text("torn")

    shutil.rmtree(run.checkpoint(1))
    restarted = Shelf(RunSource(run), run.pinned)
    restarted.refresh()

    assert pinned(run) == []
    assert steps(restarted) == []
    assert "leftover of an earlier process deleted" in caplog.text


def test_a_step_that_was_published_anew_replaces_the_old_one(run: RunDir, shelf: Shelf) -> None:
    publish(run, 1, content="old")
    shelf.refresh()
    old = shelf.hold(shelf.info(1))
    shutil.rmtree(run.checkpoint(1))
    publish(run, 1, content="new")
    shelf.refresh()

    new = shelf.hold(shelf.info(1))
    old.release()

    assert new.taken.model_file.read_text() == "new 1"
    assert pinned(run) == ["000000000001"]
