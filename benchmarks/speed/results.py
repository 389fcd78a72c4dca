"""Stores results: one JSON file per topic."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "results" / "speed"
TRIALS = Path(__file__).parents[2] / "build" / "speed"
"""For partial or quick results, which are not kept; git ignores it."""


def name_of(topic: str, *, with_peers: bool) -> str:
    """Return the name of a topic's result."""
    return f"peers_{topic}" if with_peers else topic


def save(folder: Path, name: str, result: dict[str, Any]) -> None:
    """Write a result, with one row per line for readable diffs."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = ",\n".join(f"    {json.dumps(_plain(row))}" for row in result["rows"])
    rest = {key: _plain(value) for key, value in result.items() if key != "rows"}
    head = json.dumps(rest, indent=2).removesuffix("\n}")
    (folder / f"{name}.json").write_text(f'{head},\n  "rows": [\n{rows}\n  ]\n}}\n')


def load(folder: Path) -> dict[str, dict[str, Any]]:
    """Return every result by name."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}


def _plain(value: Any) -> Any:
    """Return a value as JSON types; NaN becomes null."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
