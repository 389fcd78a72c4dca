"""What the most slices that there may be take in memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from testkit.preloading import preloaded
from understudy.evaluator.evaluation.slices import MAX_SLICES

MOST_MIB = 200
SECONDS = 120


@pytest.mark.timeout(2 * SECONDS)
def test_a_thousand_slices_take_at_most_200_mib_more_even_of_a_curve_with_a_thousand_thresholds(tmp_path: Path) -> None:
    """Both processes are forks of one, so what they have in common does not count."""
    assert MAX_SLICES == 1000
    before, after = _peak_mib(tmp_path, slices=0), _peak_mib(tmp_path, slices=MAX_SLICES)
    assert after - before < MOST_MIB


def _peak_mib(folder: Path, *, slices: int) -> float:
    completed = subprocess.run(
        [sys.executable, "-m", "testkit.peak_memory", str(folder), str(slices)],
        env={**os.environ, **preloaded()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        timeout=SECONDS,
        check=True,
    )
    return int(completed.stdout) / 2**10
