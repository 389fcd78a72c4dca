"""Pauses grow, and any number of failures has one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from understudy.checkpoints.pauses import doubling_pause


@given(failures=st.integers(0, 10**9), longest=st.floats(0.5, 3600))
def test_a_pause_never_shrinks_with_the_failures_and_has_a_bound(failures: int, longest: float) -> None:
    pause = doubling_pause(failures, first=0.5, longest=longest)
    assert 0.5 <= pause <= doubling_pause(failures + 1, first=0.5, longest=longest) <= longest
    if failures > 12:
        assert pause == longest
