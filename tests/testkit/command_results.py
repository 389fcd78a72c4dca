"""What the client's commands take and return."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import Result


def saved(tmp_path: Path, **arrays: Any) -> str:
    """Store arrays; return the path of the file."""
    file = tmp_path / "rows.npz"
    np.savez(file, **arrays)
    return str(file)


def lines_of_json(result: Result) -> list[dict[str, Any]]:
    """Return the objects that a command printed, one a line."""
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def refusal(result: Result, *, code: int) -> str:
    """Return what a command that failed with this status said."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    return result.stderr
