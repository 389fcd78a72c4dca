from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from understudy.checkpoints import (
    CheckpointGoneError,
    CheckpointPublisher,
    DamagedCheckpointError,
    RunDir,
    RunSource,
)
from understudy.checkpoints.kinds import ModelKind
from understudy.evaluator.evaluator_errors import NotReadyError, VersionNotFoundError
from understudy.evaluator.serving.checkpoint_store import CheckpointStore


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


@pytest.fixture
def store(run: RunDir) -> CheckpointStore:
    return CheckpointStore(RunSource(run), run.leases)


def publish(run: RunDir, *steps: int, content: str = "model") -> None:
    publisher = CheckpointPublisher(run, keep=100)
    for step in steps:

        def write(folder: Path, text: str = f"{content} {step}") -> None:
            (folder / "model.keras").write_text(text)

        publisher.publish(step, write, epoch=None, final=False, metrics={}, signature=None)


def steps(store: CheckpointStore) -> list[int]:
    return [info.step for info in store.checkpoints()]


def pinned(run: RunDir) -> list[str]:
    return sorted(folder.name for folder in run.leases.iterdir())


def test_what_the_source_offers_is_on_the_checkpoint_store_in_step_order(run: RunDir, store: CheckpointStore) -> None:
    publish(run, 10, 2)
    store.refresh()

    assert steps(store) == [2, 10]
    assert store.info(10).step == 10
    with pytest.raises(VersionNotFoundError, match=r"step 5; there are \[2, 10\]"):
        store.info(5)


def test_no_step_is_said_not_to_exist_before_all_were_read(
    run: RunDir, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(run, 10)
    with pytest.raises(NotReadyError, match="step 10 is not known; the checkpoints have not all been read yet"):
        store.info(10)
    with monkeypatch.context() as broken:
        broken.setattr(RunSource, "poll", Mock(side_effect=OSError("stale file handle")))
        with pytest.raises(OSError, match="stale"):
            store.refresh()
        with pytest.raises(NotReadyError, match=r"the checkpoints cannot be read \(stale file handle\); try again"):
            store.info(10)
    store.refresh()

    assert store.info(10).step == 10
    with pytest.raises(VersionNotFoundError, match="step 11"):
        store.info(11)


def test_a_time_that_is_no_date_becomes_one(run: RunDir, store: CheckpointStore) -> None:
    publish(run, 1)
    manifest = run.checkpoint(1) / "manifest.json"
    manifest.write_text("damaged")
    os.utime(manifest, (-1e9, -1e9))
    store.refresh()
    assert store.info(1).created_at == 0


def test_of_many_steps_an_error_names_those_around_the_missing_one(run: RunDir, store: CheckpointStore) -> None:
    publish(run, *range(250, 410, 10))
    store.refresh()
    with pytest.raises(
        VersionNotFoundError,
        match=r"step 305; there are 16, the nearest of which are \[260, 270, 280, 290, 300, 310, 320, 330, 340, 350\]",
    ):
        store.info(305)


def test_only_whole_models_of_keras_hold_their_metrics(run: RunDir, store: CheckpointStore) -> None:
    publish(run, 1)
    store.refresh()
    info = store.info(1)
    assert store.holds_metrics(info)
    with store.lease(info):
        shutil.rmtree(run.checkpoint(1))
        store.refresh()
        assert store.holds_metrics(info)
    assert not store.holds_metrics(info)
    assert not store.holds_metrics(replace(info, digest="of another training"))
    assert [kind for kind in ModelKind if kind.holds_metrics] == [ModelKind.KERAS, ModelKind.HDF5]


def test_a_held_checkpoint_outlives_its_deletion(run: RunDir, store: CheckpointStore) -> None:
    publish(run, 1)
    store.refresh()
    lease = store.lease(store.info(1))
    shutil.rmtree(run.checkpoint(1))
    store.refresh()

    assert lease.checkpoint.model_file.read_text() == "model 1"
    assert steps(store) == [1]
    with store.lease(store.info(1)) as again:
        assert again.checkpoint == lease.checkpoint
    lease.release()
    assert steps(store) == []
    assert pinned(run) == []


def test_the_private_folder_goes_with_the_last_hold(run: RunDir, store: CheckpointStore) -> None:
    publish(run, 1)
    store.refresh()
    first, second = store.lease(store.info(1)), store.lease(store.info(1))

    first.release()
    first.release()
    assert pinned(run) == ["000000000001"]
    second.release()
    assert pinned(run) == []
    assert steps(store) == [1]


def test_a_checkpoint_deleted_before_it_is_held_is_gone(run: RunDir, store: CheckpointStore) -> None:
    publish(run, 1)
    store.refresh()
    shutil.rmtree(run.checkpoint(1))

    with pytest.raises(CheckpointGoneError):
        store.lease(store.info(1))
    store.refresh()
    assert steps(store) == []


def test_a_flipped_bit_is_found_when_it_is_verified(run: RunDir, store: CheckpointStore) -> None:
    publish(run, 1)
    file = run.checkpoint(1) / "model.keras"
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    store.refresh()

    with store.lease(store.info(1)) as lease, pytest.raises(DamagedCheckpointError, match="SHA-256"):
        lease.verify()
    assert pinned(run) == []


def test_a_file_that_is_written_over_in_place_is_not_loaded_under_its_old_digest(
    run: RunDir, store: CheckpointStore
) -> None:
    publish(run, 1)
    store.refresh()
    with store.lease(store.info(1)) as lease:
        lease.verify()
        (run.checkpoint(1) / "model.keras").write_text("other 1")
        with pytest.raises(DamagedCheckpointError, match="SHA-256"):
            lease.verify()


def test_a_damaged_private_copy_is_made_again_where_the_original_is_whole(run: RunDir, store: CheckpointStore) -> None:
    publish(run, 1)
    store.refresh()
    with store.lease(store.info(1)) as lease:
        lease.checkpoint.model_file.unlink()
        lease.checkpoint.model_file.write_text("other 1")
        lease.verify()
        assert lease.checkpoint.model_file.read_text() == "model 1"


def test_what_an_earlier_process_held_is_on_the_checkpoint_store_again(run: RunDir, store: CheckpointStore) -> None:
    publish(run, 1, 2)
    store.refresh()
    store.lease(store.info(1))
    store.lease(store.info(2))
    shutil.rmtree(run.checkpoint(1))

    restarted = CheckpointStore(RunSource(run), run.leases)
    restarted.refresh()

    assert steps(restarted) == [1, 2]
    with restarted.lease(restarted.info(1)) as lease:
        assert lease.checkpoint.model_file.read_text() == "model 1"
        restarted.discard_leftovers()
        assert pinned(run) == ["000000000001"]
    assert steps(restarted) == [2]
    assert pinned(run) == []


def test_a_damaged_leftover_is_deleted(run: RunDir, store: CheckpointStore, caplog: pytest.LogCaptureFixture) -> None:
    publish(run, 1)
    store.refresh()
    store.lease(store.info(1))
    (run.leases / "000000000001" / "manifest.json").write_text("torn")

    shutil.rmtree(run.checkpoint(1))
    restarted = CheckpointStore(RunSource(run), run.leases)
    restarted.refresh()

    assert pinned(run) == []
    assert steps(restarted) == []
    assert "leftover of an earlier process deleted" in caplog.text


def test_a_step_that_was_published_anew_replaces_the_old_one(run: RunDir, store: CheckpointStore) -> None:
    publish(run, 1, content="old")
    store.refresh()
    old = store.lease(store.info(1))
    shutil.rmtree(run.checkpoint(1))
    publish(run, 1, content="new")
    store.refresh()

    new = store.lease(store.info(1))
    old.release()

    assert new.checkpoint.model_file.read_text() == "new 1"
    assert pinned(run) == ["000000000001"]
