"""Finds the real Prometheus, on PATH or where tools/fetch_prometheus.sh installs it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

FETCHED = Path(__file__).parents[2] / ".tools" / "prometheus" / "usr" / "bin"


def tool(name: str) -> Path:
    """Return one of Prometheus' programs; skip the test if it is missing."""
    found = shutil.which(name) or shutil.which(name, path=str(FETCHED))
    if found is None:
        pytest.skip(f"{name} is neither on PATH nor in {FETCHED}; tools/fetch_prometheus.sh fetches it")
    return Path(found)
