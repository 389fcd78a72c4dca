"""Drift in a report, from both files that hold it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from testkit.html_pages import Page
from understudy.cli.command_errors import CommandError
from understudy.cli.output import plain
from understudy.cli.report_page import drift_section, read_drift
from understudy.evaluator.evaluation.drift import DriftReport, DriftSketches
from understudy.evaluator.evaluation.drift_monitor import LiveDrift

HOSTILE = "<script>alert(1)</script>"


def report(**tensors: Any) -> DriftReport:
    reference, sample = DriftSketches(), DriftSketches()
    for name, (before, after) in tensors.items():
        reference.add("input", {name: np.asarray(before)})
        sample.add("input", {name: np.asarray(after)})
    return reference.compare(sample)


@pytest.fixture
def compared() -> DriftReport:
    countries = np.array([HOSTILE.encode()] * 3, object)
    return report(x=([1.0, 2.0, 3.0], [7.0, 8.0, np.nan]), country=(countries, countries))


def write(folder: Path, content: Any) -> Path:
    file = folder / "drift.json"
    file.write_text(json.dumps(plain(content)))
    return file


def test_what_the_command_prints_is_shown_with_the_bins(tmp_path: Path, compared: DriftReport) -> None:
    found = Page("".join(drift_section(read_drift(write(tmp_path, dataclasses.asdict(compared))))))
    assert found.headings == ["Drift"]
    assert found.tags["table"] == 3
    assert found.text.index("The input x, ") < found.text.index("The input country, ")
    assert HOSTILE in found.text
    assert "script" not in found.tags
    assert "100.0%" in found.text


def test_columns_that_are_one_feature_together_are_told(tmp_path: Path) -> None:
    wide = np.zeros((2, 40))
    file = write(tmp_path, dataclasses.asdict(report(**{HOSTILE: (wide, wide)})))
    assert (
        f"The 40 values of {HOSTILE} are one feature together." in Page("".join(drift_section(read_drift(file)))).text
    )


def test_what_a_service_writes_is_shown_with_its_reference(tmp_path: Path, compared: DriftReport) -> None:
    live = LiveDrift(
        dataset="test", step=3, examples=12, computed_at=0.0, inputs=compared, scores=report(y=([1.0], [2.0]))
    )
    found = Page("".join(drift_section(read_drift(write(tmp_path, dataclasses.asdict(live))))))
    assert found.headings == ["Drift of 12 live examples from test"]
    assert found.tags["table"] == 4


FEATURE = {"name": "x", "kind": "input", "psi": 1, "psi_by_chance": 0, "ks": 0, "reference_count": 1, "count": 1}


@pytest.mark.parametrize(
    "content",
    [
        [],
        {"features": [{"psi": 1}]},
        {"inputs": 3},
        {"features": [{"psi": "x"}]},
        {"features": [{**FEATURE, "bins": [{}]}]},
    ],
)
def test_another_file_is_refused_with_a_sentence(tmp_path: Path, content: Any) -> None:
    with pytest.raises(CommandError, match=r"drift\.json holds no drift; give what `understudy drift --json` prints"):
        read_drift(write(tmp_path, content))
