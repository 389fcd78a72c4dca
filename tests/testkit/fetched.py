"""Programs of others that tests run, which `tools/fetch_clients.sh` installs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INSTALL_SECONDS = 280


def fetched(kind: str) -> Path:
    """Return the environment of a kind of program; skip the test if it cannot be installed."""
    command = [str(ROOT / "tools" / "fetch_clients.sh"), kind]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{kind} was not installed within {INSTALL_SECONDS} s")
    if completed.returncode:
        pytest.skip(f"{kind} cannot be had: {completed.stderr.strip().splitlines()[-1:]}")
    return ROOT / ".tools" / "clients" / kind
