"""What a long trial leaves behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from soak.trial import Trial, code_digest


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


def new_trial(folder: Path) -> Trial:
    return Trial(topic="kills", count=2, seed=7, work=folder / "work", results=folder / "results")


def test_an_interrupted_trial_goes_on_though_its_result_was_written(tmp_path: Path) -> None:
    first = new_trial(tmp_path)
    first.save_state({"kills": 35})
    first.report(held=True, kills=35)
    assert new_trial(tmp_path).load_state() == {"kills": 35}


def test_a_trial_does_not_go_on_with_other_code(tmp_path: Path) -> None:
    trial = new_trial(tmp_path)
    trial.save_state({"kills": 35})
    trial.code = "of another version"
    with pytest.raises(SystemExit, match="delete it to begin anew"):
        trial.load_state()


def test_the_digest_of_the_code_changes_with_code_and_not_with_results(tmp_path: Path) -> None:
    for file in ("evaluator/a.py", "proto/a.proto", "benchmarks/results/soak_kills.json", "docs/a.md"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("first")
    first = code_digest(tmp_path)
    for file in ("benchmarks/results/soak_kills.json", "docs/a.md", "evaluator/a_pb2.py"):
        (tmp_path / file).write_text("second")
    assert code_digest(tmp_path) == first
    (tmp_path / "proto" / "a.proto").write_text("second")
    assert code_digest(tmp_path) != first
