"""Finds the real Prometheus, which tools/fetch_prometheus.sh puts where it is looked for."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

FETCHED = Path(__file__).parents[1] / ".tools" / "prometheus" / "usr" / "bin"


def tool(name: str) -> Path:
    """Return a program of Prometheus'; skip the test if there is none."""
    found = shutil.which(name) or shutil.which(name, path=str(FETCHED))
    if found is None:
        pytest.skip(f"{name} is neither on PATH nor in {FETCHED}; tools/fetch_prometheus.sh fetches it")
    return Path(found)
