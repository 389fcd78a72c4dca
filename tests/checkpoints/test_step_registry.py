"""Steps of foreign checkpoints."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.checkpoints import DamagedCheckpointError
from understudy.checkpoints.step_registry import StepRegistry, last_integer


@pytest.mark.parametrize(
    ("name", "integer"),
    [
        ("model.keras", None),
        ("epoch-07.keras", 7),
        ("run2-step-1500.keras", 1500),
        ("v3-20240229153000.keras", 3),
        ("model-999999999999.keras", 999_999_999_999),
    ],
)
def test_a_name_gives_its_last_integer(name: str, integer: int | None) -> None:
    assert last_integer(name) == integer


def test_the_count_goes_before_the_name_and_the_name_before_the_counter(tmp_path: Path) -> None:
    book = StepRegistry(tmp_path / "steps.json")
    assert book.assign("a", iterations=300, name="epoch-07.keras", file="1") == 300
    assert book.assign("b", iterations=None, name="epoch-08.keras", file="2") == 8
    assert book.assign("c", iterations=None, name="model.keras", file="3") == 301


def test_a_step_that_is_taken_goes_to_nobody_else(tmp_path: Path) -> None:
    book = StepRegistry(tmp_path / "steps.json")
    assert book.assign("a", iterations=300, name="x-1", file="1", written_ns=2) == 300
    assert book.assign("b", iterations=300, name="x-2", file="2", written_ns=1) == 299
    assert book.assign("c", iterations=300, name="x-3", file="3", written_ns=2) == 298


class Training:
    """Files that trainings write one after the other, each a registry of its own reads from the disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._clock = itertools.count(1)

    def write(self, *files: tuple[str, int | None], newest_first: bool = False) -> list[int]:
        """Write files, each with its optimizer's count; return their steps in the order of writing."""
        book = StepRegistry(self._path)
        steps = {}
        written = [(next(self._clock), *file) for file in files]
        for time, name, iterations in reversed(written) if newest_first else written:
            digest = f"{time}"
            steps[time] = book.assign(digest, iterations=iterations, name=name, file=digest, written_ns=time)
        book.save()
        return [steps[time] for time, _, _ in written]


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path / "steps.json")


FIRST = (("001", 25), ("002", 50), ("003", 75))


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize(
    "second",
    [
        pytest.param([("004", 25), ("005", 50), ("006", 75)], id="compiled anew, under other names"),
        pytest.param([("001", 25), ("002", 50)], id="from the beginning, over the files of the first"),
    ],
)
def test_a_training_that_begins_again_goes_on_after_the_steps_of_the_first(
    training: Training, second: list[tuple[str, int]], *, newest_first: bool
) -> None:
    assert training.write(*FIRST, newest_first=newest_first) == [25, 50, 75]
    assert training.write(*second, newest_first=newest_first) == [75 + iterations for _, iterations in second]
    assert training.write(("007", 100)) == [175]
    assert training.write(("007", 25)) == [176]


def test_a_file_that_is_written_again_with_a_lower_count_is_later_all_the_same(training: Training) -> None:
    assert training.write(("last", 75)) == [75]
    assert [training.write(("last", iterations)) for iterations in (30, 60, 90)] == [[76], [77], [90]]


def test_the_first_of_several_files_that_is_written_again_is_later_than_all(training: Training) -> None:
    training.write(*FIRST)
    assert [training.write((name, iterations)) for name, iterations in (("001", 30), ("002", 60))] == [[105], [135]]


def test_an_epoch_that_is_repeated_after_a_crash_moves_no_later_step(training: Training) -> None:
    training.write(*FIRST)
    assert training.write(("003", 75)) == [76]
    assert training.write(("004", 100)) == [100]


def test_files_of_an_earlier_training_that_are_read_later_stay_below_its_successor(training: Training) -> None:
    two_trainings = [*FIRST, ("004", 25), ("005", 50), ("006", 75)]
    assert training.write(*two_trainings, newest_first=True) == [24, 49, 74, 25, 50, 75]


def test_numbers_in_names_begin_again_as_counts_do(training: Training) -> None:
    assert training.write(("epoch-1", None), ("epoch-2", None), ("epoch-3", None)) == [1, 2, 3]
    assert training.write(("epoch-1", None), ("epoch-2", None), newest_first=True) == [4, 5]
    assert training.write(("epoch-3", None)) == [6]


@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from(["a", "b-1", "b-2", "c-3"]), st.none() | st.integers(0, 4)), max_size=3),
        max_size=6,
    )
)
def test_what_is_written_over_another_file_is_later_than_all(
    tmp_path_factory: pytest.TempPathFactory, writings: list[list[tuple[str, int | None]]]
) -> None:
    training = Training(tmp_path_factory.mktemp("book") / "steps.json")
    seen: list[int] = []
    known: set[str] = set()
    for files in writings:
        for name, iterations in files:
            (step,) = training.write((name, iterations))
            assert step not in seen
            assert name not in known or step > max(seen)
            seen.append(step)
            known.add(name)


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.none() | st.integers(0, 3), st.sampled_from(["m", "m2"]))))
def test_every_digest_has_one_step_of_its_own_over_restarts(
    tmp_path_factory: pytest.TempPathFactory,
    calls: list[tuple[str, int | None, str]],
) -> None:
    path = tmp_path_factory.mktemp("book") / "steps.json"
    steps: dict[str, int] = {}
    for digest, iterations, name in calls:
        book = StepRegistry(path)
        step = book.assign(digest, iterations=iterations, name=name, file=digest)
        book.save()
        assert steps.setdefault(digest, step) == step
    assert len(set(steps.values())) == len(steps)


@pytest.mark.parametrize("content", ["[]", "{", '{"a": "b"}', '{"a": null}'])
def test_a_damaged_book_is_refused_with_the_remedy(tmp_path: Path, content: str) -> None:
    path = tmp_path / "steps.json"
    path.write_text(content)
    with pytest.raises(DamagedCheckpointError, match="delete it to assign new steps"):
        StepRegistry(path)
