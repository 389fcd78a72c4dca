"""What the page says about two evaluations beside each other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from understudy.evaluator.evaluator_errors import NotEvaluableError
from understudy.evaluator.records.ledger import Ledger
from understudy.evaluator.types import EvaluationOutcome, EvaluationRecord, GateCondition, SliceScore
from understudy.service.page.comparing import ComparedDataset, recorded
from understudy.service.page.rendering import Renderer

WHY = "metrics that are updated for each part have no intervals, because the model itself would have to run"


class Evaluations:
    """The part of an evaluator that keeps evaluations, here without tables."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def flips(self, dataset: str, *, version: int, baseline: int) -> Any:
        raise NotEvaluableError(f"there are no tables of steps {version} and {baseline} on {dataset}")


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    yield ledger
    ledger.close()


def append(ledger: Ledger, step: int, *, resampled: Any = None, **fields: Any) -> None:
    """Append a score, which has these fields besides the usual ones."""
    score: dict[str, Any] = {
        "dataset": "test",
        "outcome": EvaluationOutcome.SCORED,
        "metrics": {"loss": float(step), "top": 0.5},
        "examples": 9,
    }
    entry = EvaluationRecord(step=step, checkpoint_digest=f"d{step}", **(score | fields))
    ledger.append(entry, resampled=resampled)


def compared(ledger: Ledger, *entries: dict[str, Any]) -> ComparedDataset:
    for step, entry in enumerate(entries, start=1):
        append(ledger, step, **entry)
    (found,) = recorded(Evaluations(ledger), 1, 2)  # type: ignore[arg-type]  # the part that is used
    return found


def renderer() -> Renderer:
    return Renderer("model", SimpleNamespace())  # type: ignore[arg-type]  # parts do not show the readiness


def life(entry: EvaluationRecord) -> str:
    """Return the page of a checkpoint with one entry."""
    row = SimpleNamespace(state="available", reason="", written_at=None, step=1, scores=())
    view = SimpleNamespace(row=row, digest="", exists=True, tables=(), life=(), entries=[entry])
    return renderer().part("life.html", {"root": "", "acts": (), "serving": None, "view": view})


def differences(found: ComparedDataset) -> dict[str, float | None]:
    metrics = found.parts[0].metrics
    return {each.name: None if each.difference is None else each.difference.value for each in metrics}


def test_why_there_are_no_intervals_is_said_with_the_reason_of_the_evaluations(ledger: Ledger) -> None:
    found = compared(ledger, {"notes": [WHY, "the batches ran on one replica"]}, {"notes": [WHY]})

    assert differences(found) == {"loss": 1.0, "top": 0.0}
    assert list(found.notes[:2]) == [
        "There are no intervals of the differences, as the evaluations were not resampled alike.",
        WHY,
    ]
    assert len(found.notes) == 3, "and why it is not known which examples changed"


def test_datasets_and_slices_that_one_version_lacks_are_named(ledger: Ledger) -> None:
    for step, dataset in ((1, "small"), (2, "large")):
        append(ledger, step, dataset=dataset)
    slices = [[SliceScore(name=f"predicted={label}", examples=4) for label in labels] for labels in ((0, 1), (1, 2))]
    for step, parts in enumerate(slices, start=1):
        append(ledger, step, slices=tuple(parts))
    both, small, large = recorded(Evaluations(ledger), 1, 2)  # type: ignore[arg-type]  # the part that is used

    assert [part.name for part in both.parts] == ["", "predicted=1"]
    assert [note for note in both.notes if "slices" in note] == [
        "only step 1 has these slices, so they are not compared: predicted=0",
        "only step 2 has these slices, so they are not compared: predicted=2",
    ]
    assert (small.dataset, small.notes) == (
        "small",
        ("Step 1 has a score on this dataset and step 2 has none, so there is nothing to compare.",),
    )
    assert (large.dataset, large.parts) == ("large", ())
    values = {"root": "", "acts": (), "first": 1, "second": 2, "compared": [both, small, large]}
    assert "<h2>small</h2>" in renderer().part("compared.html", values)


def test_what_is_configured_otherwise_has_no_difference_and_a_note(ledger: Ledger) -> None:
    resampled = {"loss": np.ones(20, np.float32), "top": np.ones(20, np.float32)}
    alike = {"resamples": 20, "confidence": 0.95, "resampled": resampled}
    found = compared(
        ledger, *({**alike, "metric_digests": {"loss": "l", "top": digest}} for digest in ("three", "five"))
    )

    assert differences(found) == {"loss": 1.0, "top": None}
    assert found.notes[0] == "Configured otherwise in the two evaluations, so not compared: top."


def test_what_is_undefined_in_an_evaluation_has_no_difference_and_is_shown_with_the_reason(ledger: Ledger) -> None:
    found = compared(ledger, {}, {"metrics": {"loss": 3.0}, "undefined": {"top": "the weights add up to 0"}})

    assert differences(found) == {"loss": 2.0, "top": None}
    assert found.parts[0].metrics[1].undefined == ("", "the weights add up to 0")
    values = {"root": "", "acts": (), "first": 1, "second": 2, "compared": [found]}
    assert '<td><span title="the weights add up to 0">undefined</span></td>' in renderer().part("compared.html", values)


def test_the_page_of_a_checkpoint_says_what_is_undefined_in_an_entry_and_in_its_slices(ledger: Ledger) -> None:
    part = SliceScore(name="a=1", examples=4, metrics={"loss": 1.0}, undefined={"auc": "one class"})
    score: dict[str, Any] = {"metrics": {"loss": 1.0}, "undefined": {"auc": "no <label>"}, "slices": (part,)}
    entry = ledger.append(
        EvaluationRecord(step=1, checkpoint_digest="d", dataset="test", outcome=EvaluationOutcome.SCORED, **score)
    )
    page = life(entry)

    assert '<th scope="col">auc</th>' in page
    assert '<td><span title="no &lt;label&gt;">undefined</span></td>' in page
    assert '<td><span title="one class">undefined</span></td>' in page
    assert "<li>auc is undefined: no &lt;label&gt;</li>" in page


def test_the_page_of_a_checkpoint_says_what_the_notes_of_slices_say(ledger: Ledger) -> None:
    slices = (
        SliceScore(name="a=1", examples=4, notes=("fewer than 5 examples",)),
        SliceScore(
            name="a=2", examples=9, metrics={"loss": 1.0}, notes=("no resample has it",), undefined={"auc": "one class"}
        ),
    )
    score: dict[str, Any] = {"metrics": {"loss": 1.0, "auc": 0.5}, "slices": slices}
    entry = ledger.append(
        EvaluationRecord(step=1, checkpoint_digest="d", dataset="test", outcome=EvaluationOutcome.SCORED, **score)
    )
    page = life(entry)

    assert '<td class="text">fewer than 5 examples</td></tr>' in page
    assert '<td class="text">no resample has it; auc is undefined: one class</td></tr>' in page


def test_a_condition_says_why_it_has_no_value(ledger: Ledger) -> None:
    undefined, missing = "auc of 'test' is undefined: one class", "there is no slice 'a=1' in 'test'"
    conditions = [
        GateCondition(text="test/auc >= 0.5", outcome=EvaluationOutcome.UNDECIDED, value=math.nan, reason=undefined),
        GateCondition(text="test/auc[a=1] >= 0.5", outcome=EvaluationOutcome.REFUSED, value=math.nan, reason=missing),
    ]
    decision: dict[str, Any] = {"outcome": EvaluationOutcome.REFUSED, "reason": missing, "conditions": conditions}
    page = life(ledger.append(EvaluationRecord(step=1, checkpoint_digest="d", dataset="test", **decision)))

    assert '<td><span title="auc of &#39;test&#39; is undefined: one class">undefined</span></td>' in page
    assert '<td><span title="there is no slice &#39;a=1&#39; in &#39;test&#39;">-</span></td>' in page
    assert "<li>test/auc &gt;= 0.5: auc of &#39;test&#39; is undefined: one class</li>" in page
    assert "nan" not in page
