"""Folders' names and what counts as committed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.checkpoints import RunDir
from understudy.checkpoints.layout import parse_step, step_name

_STEPS = st.integers(0, 10**12 - 1)


@given(_STEPS)
def test_a_step_comes_back_from_its_name(step: int) -> None:
    assert parse_step(step_name(step)) == step


@given(_STEPS, _STEPS)
def test_names_sort_as_steps_do(one: int, other: int) -> None:
    assert (step_name(one) < step_name(other)) == (one < other)


@pytest.mark.parametrize("name", ["7", "lock", ".tmp-000000000007-ab", "0000000000007", "00000000000x", "\u0660" * 12])
def test_other_names_are_no_steps(name: str) -> None:
    assert parse_step(name) is None


def test_a_negative_step_is_refused() -> None:
    with pytest.raises(ValueError, match=f"from 0 to {2**63 - 1}, not -1"):
        step_name(-1)


def test_only_folders_with_a_manifest_are_committed(run: RunDir) -> None:
    assert run.committed_steps() == []
    for step in (20, 3, 100):
        run.checkpoint(step).mkdir(parents=True)
    for step in (20, 3):
        (run.checkpoint(step) / "manifest.json").touch()
    assert run.committed_steps() == [3, 20]
