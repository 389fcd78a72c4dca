"""What a long trial leaves behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from soak.trial import Trial


def written(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "soak_kills.json").read_text())
    return result


def test_a_trial_that_breaks_off_did_not_hold_and_keeps_its_figures(tmp_path: Path) -> None:
    trial = Trial(topic="kills", count=2, seed=7, work=tmp_path / "work", results=tmp_path)
    trial.report(held=True, kills=35)
    assert written(tmp_path)["held"]
    trial.broke_off(RuntimeError("a task ended with 4"))
    result = written(tmp_path)
    assert (result["held"], result["kills"], result["seed"]) == (False, 35, 7)
    assert result["ended_by"] == "RuntimeError: a task ended with 4"


def test_a_trial_that_breaks_off_at_once_leaves_a_result_too(tmp_path: Path) -> None:
    trial = Trial(topic="kills", count=2, seed=7, work=tmp_path / "work", results=tmp_path)
    trial.broke_off(RuntimeError("no evaluator"))
    assert written(tmp_path) == {"topic": "kills", "held": False, "seed": 7, "ended_by": "RuntimeError: no evaluator"}
