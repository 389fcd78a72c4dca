"""The page of a report: complete, safe and readable without its pictures."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest

from testkit.html_pages import Page
from understudy.checkpoints.signature import TensorSpec
from understudy.cli.report_page import Changes, Report, ReportedVersion, page
from understudy.clients import Evaluation, ExampleList, Flips, Interval, SliceScore
from understudy.evaluator.evaluation.evaluation_stream import ExampleScores
from understudy.evaluator.evaluation.table_collector import TableCollector
from understudy.evaluator.types import Batch, OutputTask

HOSTILE = '<script>alert("1")</script>'
EXAMPLES = 40


def evaluation(step: int) -> Evaluation:
    return Evaluation(
        sequence=step,
        step=step,
        checkpoint_digest="0123456789abcdef",
        dataset=f"test {HOSTILE}",
        outcome="scored",
        reason="",
        metrics={"loss": 0.25, f"accuracy {HOSTILE}": 0.9, "odd": float("nan")},
        examples=EXAMPLES,
        duration_seconds=1.0,
        recorded_at=datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC),
        notes=(f"note {HOSTILE}",),
        intervals={"loss": Interval(low=0.2, high=0.3)},
        slices=(SliceScore(name=f"country={HOSTILE}", examples=3, metrics={"loss": 1.0}, intervals={}, notes=()),),
        resamples=200,
        confidence=0.95,
    )


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    """Return the tables of a model with an output for each task."""
    random = np.random.default_rng(4)
    p = random.random((EXAMPLES, 12)).astype(np.float32)
    outputs = {
        HOSTILE: p / p.sum(axis=1, keepdims=True),
        "binary": p[:, :1],
        "labels": p[:, :3],
        "numbers": p[:, :2],
    }
    targets = {
        HOSTILE: random.integers(0, 12, EXAMPLES),
        "binary": random.integers(0, 2, EXAMPLES),
        "labels": random.integers(0, 2, (EXAMPLES, 3)),
        "numbers": random.normal(size=(EXAMPLES, 2)),
    }
    tasks = {
        HOSTILE: OutputTask(kind="sparse", scores="probabilities"),
        "binary": OutputTask(kind="binary", scores="probabilities"),
        "labels": OutputTask(kind="multilabel", scores="probabilities"),
        "numbers": OutputTask(kind="regression"),
    }
    specs = [TensorSpec(name=name, dtype="float32", shape=(None, *array.shape[1:])) for name, array in outputs.items()]
    collector = TableCollector(tasks, specs)
    slices = {f"country={HOSTILE}": np.arange(EXAMPLES) < 9}
    collector.add(Batch(inputs={"x": p}, targets=targets), ExampleScores(random.random(EXAMPLES), outputs), slices)
    return collector.document()


@pytest.fixture(scope="module")
def changes() -> Changes:
    def listed(*indices: int) -> ExampleList:
        return ExampleList(
            evaluation=evaluation(20),
            baseline=evaluation(10),
            total=len(indices) + 5,
            indices=indices,
            described=({},) * len(indices),
            inputs={},
            targets={},
            sample_weights={},
            flips=Flips(newly_wrong=7, newly_right=8, both_right=20, both_wrong=5, p_value=1.0),
            notes=(),
        )

    return Changes(newly_wrong=listed(3, 4), newly_right=listed(11, 12, 13))


@pytest.fixture(scope="module")
def both(content: dict[str, Any], changes: Changes) -> Page:
    versions = [ReportedVersion(evaluation=evaluation(step), content=content) for step in (10, 20)]
    return Page(page(Report(model_name=f"m {HOSTILE}", versions=versions, changes=changes)))


def test_a_page_of_two_versions_says_which_metrics_cannot_be_compared(
    content: dict[str, Any], changes: Changes
) -> None:
    versions = [
        ReportedVersion(
            evaluation=replace(evaluation(step), metric_digests={"loss": "l", "odd": digest}),
            content=content,
        )
        for step, digest in ((20, "b"), (10, "a"))
    ]
    text = Page(page(Report(model_name="m", versions=versions, changes=changes))).text

    assert "from #20 (step 20) on, odd on test" in text
    assert "has another configuration; do not compare across that entry" in text
    assert "loss on test" not in text


def test_a_page_shows_what_is_undefined_with_the_reason(content: dict[str, Any], changes: Changes) -> None:
    scored = evaluation(10)
    undefined = {f"auc {HOSTILE}": f"reason {HOSTILE}"}
    slices = (replace(scored.slices[0], undefined=undefined, notes=("few examples",)),)
    one = ReportedVersion(evaluation=replace(scored, undefined=undefined, slices=slices), content=content)
    text = Page(page(Report(model_name="m", versions=[one], changes=changes))).text

    assert f"auc {HOSTILE} is undefined: reason {HOSTILE}" in text
    assert text.count("undefined") == 2 + 2, "in the notes of all examples and of the slice, and in both tables"
    assert f"few examples; auc {HOSTILE} is undefined: reason {HOSTILE}" in text


def test_a_page_is_one_file_without_references(both: Page) -> None:
    assert both.references == []
    assert "script" not in both.tags
    assert "@import" not in both.text
    assert "url(" not in both.text


def test_names_are_text_whatever_they_hold(both: Page) -> None:
    assert both.headings[0] == f"m {HOSTILE}: step 10 and step 20 on test {HOSTILE}"
    for name in (f"accuracy {HOSTILE}", f"country={HOSTILE}", f"note {HOSTILE}"):
        assert name in both.text


def test_what_a_server_says_in_the_place_of_numbers_is_text(content: dict[str, Any], changes: Changes) -> None:
    outputs = {HOSTILE: {**content["outputs"][HOSTILE], "task": HOSTILE, "right": HOSTILE, "items": HOSTILE}}
    version = ReportedVersion(evaluation=evaluation(10), content={**content, "outputs": outputs, "slices": []})
    shown = page(Report(model_name="net", versions=[version], changes=changes))
    assert "script" not in Page(shown).tags
    assert "default-src 'none'" in shown


def test_every_figure_has_a_table_of_its_data(both: Page) -> None:
    assert len(both.tables) > 30
    assert set(both.tables) == {1}
    assert both.tags["figcaption"] == both.tags["svg"] == len(both.tables)


def test_a_printed_page_has_the_data_of_its_figures_in_light_colors(both: Page) -> None:
    style = both.text
    assert "details::details-content{content-visibility:visible" in style[style.index("@media print") :]
    assert "details{display:none}" not in style
    assert style.count("@media screen and (prefers-color-scheme:dark)") == style.count("prefers-color-scheme:dark")


def test_a_page_has_a_section_for_each_output_and_its_changes(both: Page) -> None:
    expected = [
        *("Metrics", "Slices", f"Output {HOSTILE}: one of several classes", "Decisions", "ROC curve"),
        *("Output numbers: numbers", "Residuals", "Changed examples: step 20 against step 10", "Hardest examples"),
    ]
    places = [both.headings.index(heading) for heading in expected]
    assert places == sorted(places)
    assert "11, 12, 13 and 5 more" in both.text
    assert "0.25 [0.2, 0.3]" in both.text


def test_the_slices_of_an_output_stand_in_the_order_of_their_scores(content: dict[str, Any], changes: Changes) -> None:
    (last,) = evaluation(10).slices
    scored = replace(evaluation(10), slices=(replace(last, name="scored-first"), last))
    tables = {**content, "slices": [*content["slices"], content["slices"][0] | {"name": "scored-first"}]}
    versions = [ReportedVersion(evaluation=scored, content=tables)]
    text = Page(page(Report(model_name="m", versions=versions, changes=changes))).text
    of_output = text[text.index("Slices: binary") :]
    assert of_output.index("scored-first") < of_output.index(last.name)


def test_a_page_says_how_good_each_output_is_on_each_slice(both: Page) -> None:
    for name in (HOSTILE, "binary", "labels", "numbers"):
        assert f"Slices: {name}, step 20" in both.text


def test_a_page_without_changes_says_why(content: dict[str, Any]) -> None:
    versions = [ReportedVersion(evaluation=evaluation(10), content=content)]
    single = Page(page(Report(model_name="m", versions=versions, changes=Changes(reason=f"no: {HOSTILE}"))))
    assert f"no: {HOSTILE}" in single.text
