from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from understudy.checkpoints import UnsupportedFormatError
from understudy.checkpoints.evaluation_results import EvaluationResults


def publish(state: Path, step: int, *records: dict[str, Any], settled: bool = True, version: int = 1) -> Path:
    folder = state / "results"
    folder.mkdir(exist_ok=True)
    file = folder / f"{step:012d}.json"
    content = {"format_version": version, "step": step, "settled": settled, "records": records}
    file.write_text(json.dumps(content))
    return file


def record(dataset: str, outcome: str = "scored", **metrics: float | str) -> dict[str, Any]:
    return {"dataset": dataset, "outcome": outcome, "metrics": metrics, "checkpoint_digest": "d"}


def test_results_are_read_in_step_order_with_every_number(tmp_path: Path) -> None:
    publish(tmp_path, 20, record("test", loss="nan", accuracy=0.5), record("test", "refused", value=0.5))
    publish(tmp_path, 3, record("", "failed"))
    publish(tmp_path, 100, record("test", loss=0.25), settled=False)

    first, second, third = EvaluationResults(tmp_path).read()

    assert (first.step, first.settled, first.datasets, dict(first.scores)) == (3, True, frozenset(), {})
    assert math.isnan(second.scores["test"]["loss"])
    assert second.scores["test"]["accuracy"] == 0.5
    assert (third.step, third.settled, third.digests) == (100, False, frozenset({"d"}))
    assert third.contents == {"test": ""}


def test_of_several_scores_on_one_dataset_the_newest_counts(tmp_path: Path) -> None:
    first, second = (record("test", loss=loss) for loss in (0.5, 0.25))
    publish(tmp_path, 3, {**first, "dataset_digest": "a"}, {**second, "dataset_digest": "b"})

    (result,) = EvaluationResults(tmp_path).read()
    assert (result.scores, result.contents) == ({"test": {"loss": 0.25}}, {"test": "b"})


def test_a_result_says_how_each_metric_was_configured(tmp_path: Path) -> None:
    digests = {"metric_digest": "all", "metric_digests": {"loss": "squares"}}
    publish(tmp_path, 3, {**record("test", loss=0.5, mae=0.25), **digests}, record("older", loss=0.5))

    (result,) = EvaluationResults(tmp_path).read()
    assert result.configurations == {
        "test": {"loss": ("squares", "all"), "mae": ("", "all")},
        "older": {"loss": ("", "")},
    }


def test_a_result_names_the_metrics_that_are_undefined(tmp_path: Path) -> None:
    publish(tmp_path, 3, {**record("test", loss=0.5), "undefined": {"auc": "one class"}}, record("older", loss=0.5))

    (result,) = EvaluationResults(tmp_path).read()
    assert result.undefined == {"test": {"auc"}, "older": frozenset()}


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    results = EvaluationResults(tmp_path)
    assert results.read() == []
    assert results.of(1) is None
    file = publish(tmp_path, 1, settled=False)
    assert [result.settled for result in results.read()] == [False]
    file.unlink()
    publish(tmp_path, 1, record("test", loss=1.0))
    assert [result.settled for result in results.read()] == [True]


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"format_version": 1, "step": "x", "records": []}'])
def test_a_file_that_is_no_result_is_named(tmp_path: Path, content: str) -> None:
    publish(tmp_path, 1).write_text(content)
    with pytest.raises(UnsupportedFormatError, match=r"000000000001\.json is not a result"):
        EvaluationResults(tmp_path).read()


def test_another_version_is_refused(tmp_path: Path) -> None:
    publish(tmp_path, 1, version=2)
    with pytest.raises(UnsupportedFormatError, match="format version 2; this program reads 1"):
        EvaluationResults(tmp_path).of(1)
