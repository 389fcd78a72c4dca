"""Steps of foreign checkpoints."""

from __future__ import annotations

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
    assert book.assign("a", iterations=300, name="x-1.keras", file="1") == 300
    assert book.assign("b", iterations=300, name="x-1.keras", file="1") == 1
    assert book.assign("c", iterations=300, name="x-1.keras", file="1") == 301


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
