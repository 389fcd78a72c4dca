"""A folder of many checkpoints that another program wrote: which are read first, and which steps they get."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from testkit.polling import poll_all, polled, steps_of
from understudy.checkpoints import (
    CheckpointGoneError,
    DamagedCheckpointError,
    FolderSource,
)
from understudy.checkpoints.foreign import ForeignFiles, WholeCopy

from .conftest import WriteKeras, set_modified, staged


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were copied."""
    copies: list[str] = []
    copy = ForeignFiles.copy_into

    def counting(self: ForeignFiles, folder: Path) -> WholeCopy:
        copies.append(self.path.name)
        return copy(self, folder)

    monkeypatch.setattr(ForeignFiles, "copy_into", counting)
    return copies


def many(folder: Path, write_keras: WriteKeras, count: int) -> None:
    """Write as many files, the later the higher their number, which is also their optimizer's count."""
    folder.mkdir()
    for step in range(1, count + 1):
        path = write_keras(folder / f"model-{step:03d}.keras", weight=step, iterations=step)
        os.utime(path, (1000 + step, 1000 + step))


def test_of_many_files_the_newest_are_read_first_and_few_of_them(
    tmp_path: Path, write_keras: WriteKeras, copies: list[str]
) -> None:
    many(tmp_path / "theirs", write_keras, 40)
    source = FolderSource(tmp_path / "theirs", tmp_path / "staging")
    assert [checkpoint.step for checkpoint in polled(source, {7})] == [7, 38, 39, 40]
    assert len(copies) == 4
    assert not source.is_complete
    assert [checkpoint.step for checkpoint in poll_all(source)] == [*range(1, 41)]
    assert len(copies) == len(set(copies)) == 40
    staged = [path for path in (tmp_path / "staging").iterdir() if path.is_dir()]
    assert len(staged) <= 4


def test_a_file_that_is_deleted_while_it_waits_to_be_read_is_reported_once(
    tmp_path: Path, write_keras: WriteKeras
) -> None:
    many(tmp_path / "theirs", write_keras, 10)
    source = FolderSource(tmp_path / "theirs", tmp_path / "staging")
    source.poll()
    (tmp_path / "theirs" / "model-002.keras").unlink()
    gone = next(checkpoint for checkpoint in polled(source) if checkpoint.step == 2)
    with pytest.raises(CheckpointGoneError, match=r"model-002\.keras was deleted before it could be read"):
        gone.fetch(tmp_path / "pinned")
    assert [checkpoint.step for checkpoint in poll_all(source)] == [1, *range(3, 11)]


NAMES_WITHOUT_A_NUMBER = ["".join(letters) for letters in itertools.product("abc", repeat=3)][:20]


def write_unnumbered(
    folder: Path, write_keras: WriteKeras, name: Callable[[int], str], *, iterations: bool = False
) -> None:
    """Write 20 files, each later than the one before by its time, but not by its name."""
    for place in range(20):
        path = write_keras(folder / name(place), weight=place, iterations=100 + place if iterations else None)
        set_modified(path, 1000 + place)


def unnumbered(place: int) -> str:
    return f"{NAMES_WITHOUT_A_NUMBER[-place]}.keras"


def alike(place: int) -> str:
    return f"{NAMES_WITHOUT_A_NUMBER[-place]}-7.keras"


@pytest.mark.parametrize("name", [unnumbered, alike])
def test_of_many_files_without_numbers_the_newest_is_read_first_and_steps_follow_the_order_of_writing(
    folder: Path, source: FolderSource, write_keras: WriteKeras, copies: list[str], name: Callable[[int], str]
) -> None:
    write_unnumbered(folder, write_keras, name)
    first = polled(source)
    assert copies == [name(place) for place in (19, 18, 17, 16)]
    assert not source.is_complete
    found = poll_all(source)
    assert [checkpoint.created_at for checkpoint in found] == [1000.0 + place for place in range(20)]
    assert {checkpoint.step for checkpoint in first} == {checkpoint.step for checkpoint in found[-4:]}
    assert len({checkpoint.step for checkpoint in found}) == 20
    assert len(copies) == 20

    set_modified(write_keras(folder / "z.keras", weight=99), 900)  # by its time the oldest
    assert max(polled(source), key=lambda checkpoint: checkpoint.step).created_at == 900.0


def test_steps_of_files_without_numbers_that_were_not_read_before_a_restart_keep_the_order_of_writing(
    folder: Path, tmp_path: Path, source: FolderSource, write_keras: WriteKeras, copies: list[str]
) -> None:
    write_unnumbered(folder, write_keras, unnumbered)
    newest = polled(source)[-1]
    restarted = FolderSource(folder, tmp_path / "staging")
    copies.clear()
    wanted = newest.step - 9
    assert wanted in {checkpoint.step for checkpoint in polled(restarted, {wanted})}
    assert copies == [unnumbered(place) for place in (10, 19, 18, 17)]
    found = poll_all(restarted)
    assert [checkpoint.created_at for checkpoint in found] == [1000.0 + place for place in range(20)]
    assert found[-1].step == newest.step


def test_many_files_without_numbers_get_their_optimizers_counts(
    folder: Path, source: FolderSource, write_keras: WriteKeras
) -> None:
    write_unnumbered(folder, write_keras, unnumbered, iterations=True)
    assert [checkpoint.step for checkpoint in polled(source)] == [116, 117, 118, 119]
    assert [checkpoint.step for checkpoint in poll_all(source)] == [*range(100, 120)]


@pytest.mark.parametrize(
    ("name", "iterations", "told"),
    [
        (
            f"model-{2**63}.keras",
            None,
            f"model-{2**63}.keras: the number {2**63} is above the highest step, {2**63 - 1}",
        ),
        ("model.keras", -3, r"model\.keras: its optimizer has taken -3 steps, expected 0 to"),
    ],
)
def test_a_file_whose_step_would_be_out_of_range_is_refused_by_name_and_the_others_are_found(
    folder: Path,
    tmp_path: Path,
    source: FolderSource,
    write_keras: WriteKeras,
    *,
    name: str,
    iterations: int | None,
    told: str,
) -> None:
    write_keras(folder / "model-5.keras", weight=5)
    write_keras(folder / name, iterations=iterations)
    (refused,) = [checkpoint for checkpoint in polled(source) if checkpoint.step != 5]
    assert 0 <= refused.step < 2**63
    with pytest.raises(DamagedCheckpointError, match=told):
        refused.fetch(tmp_path / "pinned")
    assert [path.name for path in staged(tmp_path)] == [
        checkpoint.digest for checkpoint in polled(source) if checkpoint.step == 5
    ]


def test_a_hash_or_a_count_of_its_own_is_no_step_out_of_range(
    folder: Path, source: FolderSource, write_keras: WriteKeras
) -> None:
    write_keras(folder / f"a{2**64}b.keras", weight=1)
    write_keras(folder / f"model-{2**63}.keras", weight=2, iterations=20)
    assert [step for step in steps_of(source) if step != 20] in ([1], [21])


def test_after_the_highest_step_the_counter_takes_free_ones_below(
    folder: Path, source: FolderSource, write_keras: WriteKeras
) -> None:
    set_modified(write_keras(folder / "a.keras", weight=1, iterations=2**63 - 1), 1000)
    write_keras(folder / "b.keras", weight=2)
    assert steps_of(source) == [2**63 - 2, 2**63 - 1]
