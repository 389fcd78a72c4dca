"""Tables of outputs, against scikit-learn and NumPy, and independent of the sizes of batches."""

from __future__ import annotations

import json
import re
import tracemalloc
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics
from sklearn.calibration import calibration_curve

from understudy.checkpoints.signature import TensorSpec
from understudy.evaluator.evaluation import curves, table_collector
from understudy.evaluator.evaluation.class_decisions import decide
from understudy.evaluator.evaluation.evaluation_stream import ExampleScores
from understudy.evaluator.evaluation.residuals import Residuals
from understudy.evaluator.evaluation.table_collector import MAX_SLICES, TableCollector
from understudy.evaluator.evaluation.tables import MAX_CLASSES, MAX_MATRIX_CLASSES
from understudy.evaluator.model.output_tasks import output_tasks
from understudy.evaluator.types import Array, Batch, OutputTask, ScoreKind, TaskKind

SEEDS = st.integers(0, 2**31)
SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=8)
FEW = settings(max_examples=40)


def collected(
    kind: TaskKind,
    outputs: Array,
    targets: Array,
    *,
    sizes: list[int] | None = None,
    scores: ScoreKind = "probabilities",
    slices: Mapping[str, Array] | None = None,
    weights: Array | None = None,
    mask: Array | None = None,
) -> dict[str, Any]:
    """Return the document of a model with one output, scored in batches of these sizes."""
    spec = TensorSpec(name="y", dtype="float32", shape=(None, *outputs.shape[1:]))
    collector = TableCollector({"y": OutputTask(kind=kind, scores=scores)}, [spec])
    first = 0
    for size in sizes or [len(outputs)]:
        part = slice(first, first + size)
        losses = np.abs(outputs[part].astype(np.float64)).reshape(size, -1).sum(axis=1)
        collector.add(
            Batch(
                inputs={"x": np.zeros((size, 1), np.float32)},
                targets={"targets": targets[part]},
                sample_weights={} if weights is None else {"sample_weights": weights[part]},
            ),
            ExampleScores(losses, {"y": outputs[part]}, masks={} if mask is None else {"y": mask[part]}),
            {name: members[part] for name, members in (slices or {}).items()},
        )
        first += size
    document: dict[str, Any] = json.loads(json.dumps(collector.document()))
    return document


def tables_of(*arguments: Any, **options: Any) -> dict[str, Any]:
    tables: dict[str, Any] = collected(*arguments, **options)["outputs"]["y"]
    return tables


def probabilities(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).beta(0.4, 0.4, shape).astype(np.float32)


def softmax_outputs(seed: int, examples: int, classes: int) -> Array:
    logits = np.random.default_rng(seed).normal(size=(examples, classes)) * 3
    powers = np.exp(logits)
    return np.asarray(powers / powers.sum(axis=1, keepdims=True), np.float32)


def whole_numbers(seed: int, limit: int, *shape: int) -> Array:
    return np.random.default_rng(seed + 1).integers(0, limit, shape)


@given(seed=SEEDS, sizes=SIZES)
@FEW
def test_a_roc_curve_is_the_one_of_scikit_learn_on_binned_scores(seed: int, sizes: list[int]) -> None:
    p, y = probabilities(seed, sum(sizes), 1), whole_numbers(seed, 2, sum(sizes))
    label = tables_of("binary", p, y, sizes=sizes)["labels"][0]
    binned = curves.score_bins(curves.log_odds(p[:, 0]), curves.SCORE_BINS)
    with np.errstate(invalid="ignore", divide="ignore"):
        fpr, tpr, _ = metrics.roc_curve(y, binned, drop_intermediate=False) if 0 < y.sum() < len(y) else ([], [], None)
    if len(fpr):
        curve = label["curve"]
        assert np.array(curve["false_positives"]) / label["negatives"] == pytest.approx(fpr[1:], abs=1e-12)
        assert np.array(curve["true_positives"]) / label["positives"] == pytest.approx(tpr[1:], abs=1e-12)
        assert label["auc"] == pytest.approx(metrics.roc_auc_score(y, binned), abs=1e-12)
    else:
        assert label["auc"] is None


@given(seed=SEEDS, sizes=SIZES)
@FEW
def test_precision_and_recall_are_those_of_scikit_learn_on_binned_scores(seed: int, sizes: list[int]) -> None:
    p, y = probabilities(seed, sum(sizes), 1), whole_numbers(seed, 2, sum(sizes))
    y[0] = 1
    label = tables_of("binary", p, y, sizes=sizes)["labels"][0]
    binned = curves.score_bins(curves.log_odds(p[:, 0]), curves.SCORE_BINS)
    precision, recall, _ = metrics.precision_recall_curve(y, binned)
    tp, fp = (np.array(label["curve"][name]) for name in ("true_positives", "false_positives"))
    assert tp / (tp + fp) == pytest.approx(precision[-2::-1], abs=1e-12)
    assert tp / label["positives"] == pytest.approx(recall[-2::-1], abs=1e-12)
    assert label["average_precision"] == pytest.approx(metrics.average_precision_score(y, binned), abs=1e-12)
    for row in label["thresholds"]:
        reached = (
            precision[:-1][recall[:-1] >= row["level"]]
            if row["at"] == "recall"
            else recall[:-1][precision[:-1] >= row["level"]]
        )
        best = row.get("precision" if row["at"] == "recall" else "recall")
        assert best == (pytest.approx(reached.max()) if len(reached) else None)


def test_the_areas_of_many_scores_are_those_of_scikit_learn_within_the_bins() -> None:
    y = whole_numbers(3, 2, 20_000)
    p = np.clip(probabilities(3, 20_000) * 0.7 + y * 0.2, 0, 1).astype(np.float32)[:, np.newaxis]
    label = tables_of("binary", p, y)["labels"][0]
    assert label["auc"] == pytest.approx(metrics.roc_auc_score(y, p[:, 0]), abs=1e-4)
    assert label["average_precision"] == pytest.approx(metrics.average_precision_score(y, p[:, 0]), abs=1e-4)
    assert len(label["curve"]["threshold"]) <= curves.CURVE_POINTS
    assert label["curve"]["true_positives"][-1] == y.sum()


@given(p=st.floats(0.0, 1.0, width=32))
def test_a_score_is_at_or_above_the_threshold_of_its_bin(p: float) -> None:
    (index,) = curves.score_bins(curves.log_odds(np.array([p])), curves.SCORE_BINS)
    assert curves.bin_threshold(int(index), curves.SCORE_BINS) <= p + 1e-12
    if index < curves.SCORE_BINS - 1:
        above = curves.bin_threshold(int(index) + 1, curves.SCORE_BINS)
        assert p <= above + 1e-12
        assert index == 0 or above - curves.bin_threshold(int(index), curves.SCORE_BINS) <= 0.0005


@given(seed=SEEDS, sizes=SIZES)
@FEW
def test_reliability_and_brier_are_those_of_scikit_learn(seed: int, sizes: list[int]) -> None:
    p, y = probabilities(seed, sum(sizes), 1), whole_numbers(seed, 2, sum(sizes))
    label = tables_of("binary", p, y, sizes=sizes)["labels"][0]
    shares, means = calibration_curve(y, p[:, 0].astype(np.float64), n_bins=curves.RELIABILITY_BINS)
    bins = label["reliability"]
    counts = np.array(bins["negatives"]) + np.array(bins["positives"])
    occupied = counts > 0
    assert np.array(bins["positives"])[occupied] / counts[occupied] == pytest.approx(shares)
    assert [mean for mean in bins["mean_probability"] if mean is not None] == pytest.approx(means)
    assert label["brier"] == pytest.approx(metrics.brier_score_loss(y, p[:, 0].astype(np.float64), labels=[0, 1]))
    assert label["ece"] == pytest.approx(np.average(np.abs(shares - means), weights=counts[occupied]))


@given(seed=SEEDS, sizes=SIZES, classes=st.integers(2, 6), kind=st.sampled_from(["sparse", "categorical"]))
@FEW
def test_a_confusion_matrix_is_the_one_of_scikit_learn(
    seed: int, sizes: list[int], classes: int, kind: TaskKind
) -> None:
    outputs, actual = softmax_outputs(seed, sum(sizes), classes), whole_numbers(seed, classes, sum(sizes))
    targets = np.eye(classes, dtype=np.float32)[actual] if kind == "categorical" else actual
    tables = tables_of(kind, outputs, targets, sizes=sizes)
    predicted = outputs.argmax(axis=1)
    assert tables["confusion"] == metrics.confusion_matrix(actual, predicted, labels=range(classes)).tolist()
    assert tables["right"] == (actual == predicted).sum()
    assert sum(pair["count"] for pair in tables["most_confused"]) == (actual != predicted).sum()
    exact = outputs.astype(np.float64)
    assert tables["confidence"]["brier"] == pytest.approx(np.square(exact - np.eye(classes)[actual]).sum(axis=1).mean())


def test_one_class_against_the_rest_has_the_curve_of_its_probability() -> None:
    outputs, actual = softmax_outputs(5, 3000, 4), whole_numbers(5, 4, 3000)
    labels = tables_of("sparse", outputs, actual)["labels"]
    for index, label in enumerate(labels):
        assert label["auc"] == pytest.approx(metrics.roc_auc_score(actual == index, outputs[:, index]), abs=1e-3)
        assert label["positives"] == (actual == index).sum()


def test_logits_count_as_the_probabilities_that_they_stand_for() -> None:
    outputs, actual = softmax_outputs(6, 500, 3).astype(np.float64), whole_numbers(6, 3, 500)
    by_logits = tables_of("sparse", np.log(outputs) + 7, actual, scores="logits")
    assert by_logits["confusion"] == tables_of("sparse", outputs, actual)["confusion"]
    assert by_logits["confidence"]["ece"] == pytest.approx(tables_of("sparse", outputs, actual)["confidence"]["ece"])
    p, y = probabilities(6, 500, 1).clip(1e-6, 1 - 1e-6), whole_numbers(6, 2, 500)
    logits = curves.log_odds(p)
    assert tables_of("binary", logits, y, scores="logits")["confusion"] == tables_of("binary", p, y)["confusion"]


def test_several_labels_at_once_have_a_table_each() -> None:
    p, y = probabilities(8, 400, 3), whole_numbers(8, 2, 400, 3)
    document = collected("multilabel", p, y, sizes=[150, 250])
    tables = document["outputs"]["y"]
    for index, (label, counts) in enumerate(zip(tables["labels"], tables["per_label"], strict=True)):
        ((tn, fp), (fn, tp)) = metrics.confusion_matrix(y[:, index], p[:, index] > 0.5)
        kinds = ("true_negatives", "false_positives", "false_negatives", "true_positives")
        assert [counts[kind] for kind in kinds] == [tn, fp, fn, tp]
        assert label["auc"] == pytest.approx(metrics.roc_auc_score(y[:, index], p[:, index]), abs=1e-3)
    assert document["outcomes"]["right"] == ((p > 0.5) == y).all(axis=1).sum() == tables["right"]


@given(seed=SEEDS, sizes=SIZES)
@FEW
def test_the_tables_do_not_depend_on_the_sizes_of_batches(seed: int, sizes: list[int]) -> None:
    outputs, actual = softmax_outputs(seed, sum(sizes), 3), whole_numbers(seed, 3, sum(sizes))
    members = {"odd": np.arange(sum(sizes)) % 2 == 1}
    parts = collected("sparse", outputs, actual, sizes=sizes, slices=members)
    whole = collected("sparse", outputs, actual, slices=members)
    assert parts == _rounded(whole)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return pytest.approx(value, rel=1e-9, abs=1e-12)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def test_the_tables_of_a_slice_are_those_of_its_examples_alone() -> None:
    outputs, actual = softmax_outputs(9, 300, 3), whole_numbers(9, 3, 300)
    members = np.arange(300) % 3 == 0
    (of_slice,) = collected("sparse", outputs, actual, sizes=[100, 200], slices={"third": members})["slices"]
    alone = tables_of("sparse", outputs[members], actual[members])
    assert (of_slice["name"], of_slice["examples"]) == ("third", 100)
    assert of_slice["outputs"]["y"]["confusion"] == alone["confusion"]
    assert of_slice["outputs"]["y"]["confidence"]["ece"] == pytest.approx(alone["confidence"]["ece"])
    assert of_slice["outputs"]["y"]["labels"][0]["auc"] == alone["labels"][0]["auc"]


def test_the_slices_with_tables_are_those_that_come_first_and_they_are_bounded() -> None:
    outputs, actual = softmax_outputs(9, 200, 3), whole_numbers(9, 3, 200)
    members = {f"s{199 - index}": np.arange(200) == index for index in range(100)}
    documents = [collected("sparse", outputs, actual, sizes=sizes, slices=members) for sizes in ([200], [50] * 4)]
    for document in documents:
        assert [one["name"] for one in document["slices"]] == [f"s{199 - index}" for index in range(MAX_SLICES)]
        assert f"kept for {MAX_SLICES} slices" in document["notes"][0]


def test_tables_of_slices_that_are_too_large_have_no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_collector, "MAX_SLICE_CHARACTERS", 1000)
    outputs, actual = softmax_outputs(9, 20, 3), whole_numbers(9, 3, 20)
    document = collected("sparse", outputs, actual, slices={"all": np.ones(20, bool)})
    assert document["slices"][0]["outputs"]["y"]["labels"] == []
    assert document["outputs"]["y"]["labels"]
    assert "curves are left out" in document["notes"][0]


def test_positions_of_sequences_are_items_and_an_example_is_right_if_all_of_its_positions_are() -> None:
    outputs = softmax_outputs(10, 60 * 5, 3).reshape(60, 5, 3)
    actual = outputs.argmax(axis=2)
    actual[:7, 2] += 1
    actual %= 3
    document = collected("sparse", outputs, actual)
    assert document["outputs"]["y"]["items"] == 300
    assert document["outputs"]["y"]["right"] == 293
    assert document["outcomes"]["right"] == 53


@pytest.mark.parametrize("bad", [-1, 3])
def test_a_class_that_does_not_exist_and_an_output_that_is_no_number_are_left_out(bad: int) -> None:
    outputs, actual = softmax_outputs(11, 10, 3), whole_numbers(11, 3, 10)
    actual[4], outputs[6, 1] = bad, np.nan
    decisions = decide(OutputTask(kind="sparse", scores="probabilities"), outputs, actual)
    assert decisions.left_out == 2
    assert not decisions.right[[4, 6]].any()
    assert tables_of("sparse", outputs, actual)["items"] == 8


def test_a_slice_whose_items_are_all_left_out_has_no_tables() -> None:
    outputs, actual = softmax_outputs(11, 6, 3), np.array([0, 1, 2, 9, 9, 9])
    slices = {"valid": np.arange(6) < 3, "invalid": np.arange(6) >= 3}
    for sizes in ([6], [3, 3]):
        valid, invalid = collected("sparse", outputs, actual, sizes=sizes, slices=slices)["slices"]
        assert valid["outputs"]["y"]["items"] == 3
        assert (invalid["examples"], invalid["outputs"]) == (3, {})


def test_memory_does_not_grow_with_the_examples_but_for_three_bytes_each() -> None:
    spec = TensorSpec(name="y", dtype="float32", shape=(None, 3))
    collector = TableCollector({"y": OutputTask(kind="sparse", scores="probabilities")}, [spec])
    outputs, actual = softmax_outputs(15, 1000, 3), whole_numbers(15, 3, 1000)
    batch = Batch(inputs={"x": np.zeros((1000, 1), np.float32)}, targets={"targets": actual})
    scores = ExampleScores(np.arange(1000.0), {"y": outputs})
    members = {"odd": np.arange(1000) % 2 == 1}
    tracemalloc.start()
    try:
        sizes = []
        for _ in range(2):
            for _ in range(50):
                collector.add(batch, scores, members)
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert sizes[1] - sizes[0] < 4 * 50_000


def test_outputs_that_are_no_probabilities_have_a_confusion_matrix_and_no_curve() -> None:
    outputs, actual = np.random.default_rng(12).normal(size=(50, 3)), whole_numbers(12, 3, 50)
    tables = tables_of("sparse", outputs, actual)
    assert np.sum(tables["confusion"]) == 50
    assert tables["labels"] == []
    assert "not known to be probabilities" in tables["notes"][0]


def test_many_classes_have_bounded_tables() -> None:
    classes = MAX_CLASSES + 1
    for count, has_matrix, has_totals in ((MAX_MATRIX_CLASSES + 1, False, True), (classes, False, False)):
        outputs, actual = softmax_outputs(13, 40, count), whole_numbers(13, count, 40)
        tables = tables_of("sparse", outputs, actual)
        assert (tables["confusion"] is not None, bool(tables["per_class"])) == (has_matrix, has_totals)
        assert tables["labels"] == []
        assert tables["confidence"]["ece"] is not None


@given(seed=SEEDS, sizes=SIZES)
@FEW
def test_residuals_have_exact_counts_and_their_errors(seed: int, sizes: list[int]) -> None:
    random = np.random.default_rng(seed)
    outputs, targets = random.normal(size=(2, sum(sizes), 2)) * 10.0 ** random.integers(-6, 6)
    tables = tables_of("regression", outputs, targets, sizes=sizes)
    residuals = outputs - targets
    assert tables["mean_absolute"] == pytest.approx(np.abs(residuals).mean())
    assert tables["root_mean_square"] == pytest.approx(np.sqrt(np.square(residuals).mean()))
    histogram = tables["histogram"]
    assert sum(histogram["counts"]) + histogram["below"] + histogram["above"] == residuals.size
    for quantile, value in tables["quantiles"].items():
        expected = np.quantile(residuals, float(quantile), method="inverted_cdf")
        assert value == pytest.approx(expected, rel=1 / 256)
    assert [one["mean"] for one in tables["components"]] == pytest.approx(residuals.mean(axis=0))


def test_a_histogram_of_equal_residuals_and_of_none() -> None:
    same = Residuals(1)
    same.add(np.full((5, 1), 2.5), np.full((5, 1), 2.5), np.zeros(5, np.int64), np.ones((5, 1)))
    same.add(np.full((1, 1), np.nan), np.zeros((1, 1)), np.zeros(1, np.int64), np.ones((1, 1)))
    document = same.document()
    assert (document["items"], document["left_out"], document["quantiles"]["0.5"]) == (5, 1, 0.0)
    assert sum(document["histogram"]["counts"]) == 5
    none = Residuals(1)
    none.add(np.full((1, 1), np.nan), np.zeros((1, 1)), np.zeros(1, np.int64), np.ones((1, 1)))
    assert none.document()["histogram"] is None


@pytest.mark.parametrize(
    ("loss", "width", "expected"),
    [
        ("binary_crossentropy", 1, ("binary", "probabilities")),
        ("BinaryCrossentropy", 3, ("multilabel", "probabilities")),
        ({"class_name": "BinaryCrossentropy", "config": {"from_logits": True}}, 1, ("binary", "logits")),
        ({"class_name": "function", "config": "sparse_categorical_crossentropy"}, 9, ("sparse", "probabilities")),
        ({"class_name": "CategoricalFocalCrossentropy", "config": {}}, 9, ("categorical", "probabilities")),
        ("hinge", 1, ("binary", "unknown")),
        ("mse", 1, ("regression", "unknown")),
        ({"class_name": "Own>Loss", "config": {}}, 1, ("unknown", "unknown")),
        (None, 1, ("unknown", "unknown")),
    ],
)
def test_the_loss_tells_the_task_of_an_output(loss: Any, width: int, expected: tuple[str, str]) -> None:
    (task,) = output_tasks(loss, ["y"], [width]).values()
    assert (task.kind, task.scores) == expected


def test_each_output_has_the_task_of_its_own_loss() -> None:
    names, widths = ["a", "b"], [1, 4]
    by_name = output_tasks({"b": "sparse_categorical_crossentropy", "a": "mse"}, names, widths)
    in_order = output_tasks(["mse", "sparse_categorical_crossentropy"], names, widths)
    assert {name: task.kind for name, task in by_name.items()} == {"a": "regression", "b": "sparse"}
    assert by_name == in_order


def test_an_output_with_an_unknown_loss_has_the_task_that_its_targets_tell() -> None:
    outputs, actual = softmax_outputs(14, 20, 3), whole_numbers(14, 3, 20)
    assert tables_of("unknown", outputs, actual, scores="unknown")["task"] == "sparse"
    assert tables_of("unknown", outputs, outputs, scores="unknown")["task"] == "regression"


@given(seed=SEEDS, sizes=SIZES)
@FEW
def test_sample_weights_enter_the_confusions_and_curves_as_in_scikit_learn(seed: int, sizes: list[int]) -> None:
    examples = sum(sizes)
    p, y = softmax_outputs(seed, examples, 3), whole_numbers(seed, 3, examples)
    weights = np.random.default_rng(seed).uniform(0.1, 3, examples)
    found = tables_of("sparse", p, y, sizes=sizes, weights=weights)
    expected = metrics.confusion_matrix(y, p.argmax(axis=1), labels=range(3), sample_weight=weights)
    np.testing.assert_allclose(found["confusion"], expected)
    assert found["items"] == pytest.approx(weights.sum())
    right = metrics.accuracy_score(y, p.argmax(axis=1), sample_weight=weights, normalize=False)
    assert found["right"] == pytest.approx(right)
    q, z = probabilities(seed, examples, 1), whole_numbers(seed, 2, examples)
    label = tables_of("binary", q, z, sizes=sizes, weights=weights)["labels"][0]
    assert label["brier"] == pytest.approx(metrics.brier_score_loss(z, q[:, 0], sample_weight=weights))
    binned = curves.score_bins(curves.log_odds(q[:, 0]), curves.SCORE_BINS)
    if len(set(z.tolist())) == 2:
        assert label["auc"] == pytest.approx(metrics.roc_auc_score(z, binned, sample_weight=weights))
        precision = metrics.average_precision_score(z, binned, sample_weight=weights)
        assert label["average_precision"] == pytest.approx(precision)
    counts = np.asarray(label["reliability"]["negatives"]) + label["reliability"]["positives"]
    places = np.minimum(np.searchsorted(np.linspace(0, 1, 21)[1:-1], q[:, 0]), 19)
    np.testing.assert_allclose(counts, np.bincount(places, weights=weights, minlength=20))


def test_weights_that_are_whole_numbers_count_as_repeated_examples() -> None:
    p, y = softmax_outputs(5, 60, 3), whole_numbers(5, 3, 60)
    counts = whole_numbers(6, 4, 60)
    slices = {"a": np.arange(60) % 2 == 0}
    repeated = {"a": np.repeat(slices["a"], counts)}
    found = collected("sparse", p, y, weights=counts.astype(np.float32), slices=slices, sizes=[20, 40])
    expected = collected("sparse", np.repeat(p, counts, axis=0), np.repeat(y, counts), slices=repeated)
    for one, other in (
        (found["outputs"]["y"], expected["outputs"]["y"]),
        (found["slices"][0]["outputs"]["y"], expected["slices"][0]["outputs"]["y"]),
    ):
        for name in ("items", "right", "confusion", "per_class", "most_confused"):
            assert one[name] == other[name]
        assert one["labels"][0]["curve"] == other["labels"][0]["curve"]


def test_residuals_are_weighted_as_numpy_weighs_them() -> None:
    outputs, targets = np.random.default_rng(2).normal(size=(2, 400, 3)).astype(np.float32)
    weights = np.random.default_rng(3).uniform(0, 2, 400)
    found = tables_of("regression", outputs, targets, weights=weights, sizes=[100, 300])
    errors = (outputs.astype(np.float64) - targets).ravel()
    each = np.repeat(weights, 3)
    assert found["mean_absolute"] == pytest.approx(np.average(np.abs(errors), weights=each))
    square = metrics.mean_squared_error(targets, outputs, sample_weight=weights)
    assert found["root_mean_square"] == pytest.approx(np.sqrt(square))
    order = np.argsort(errors)
    median = errors[order][np.searchsorted(np.cumsum(each[order]), each.sum() / 2)]
    assert found["quantiles"]["0.5"] == pytest.approx(median, rel=1 / 256)
    assert sum(found["histogram"]["counts"]) + found["histogram"]["below"] + found["histogram"][
        "above"
    ] == pytest.approx(each.sum())


def test_positions_that_a_mask_hides_do_not_count() -> None:
    outputs = softmax_outputs(1, 12, 3).reshape(4, 3, 3)
    targets = whole_numbers(1, 3, 4, 3)
    mask = np.arange(3) < np.array([[3], [1], [2], [0]])
    hidden = np.where(mask[..., None], outputs, np.nan).astype(np.float32)
    document = collected("sparse", hidden, targets, mask=mask, sizes=[1, 3])
    found = document["outputs"]["y"]
    expected = metrics.confusion_matrix(targets[mask], outputs.argmax(axis=-1)[mask], labels=range(3))
    assert found["confusion"] == expected.tolist()
    assert (found["items"], found["left_out"]) == (6, 0)
    weights = np.random.default_rng(4).uniform(0, 1, (4, 3))
    weighted = tables_of("sparse", outputs, targets, mask=mask, weights=weights)
    of_tokens = metrics.confusion_matrix(
        targets[mask], outputs.argmax(axis=-1)[mask], labels=range(3), sample_weight=weights[mask]
    )
    np.testing.assert_allclose(weighted["confusion"], of_tokens)
    errors = tables_of("regression", outputs, outputs + 1, mask=mask)
    assert (errors["items"], errors["left_out"]) == (18, 0)


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (np.ones((4, 2), np.float32), r"its targets have the shape \[examples, 2\], its values \[examples, 1\]"),
        (np.ones((4, 3, 2), np.float32), r"its targets have the shape \[examples, 3, 2\]"),
        (np.array([b"a", b"b", b"c", b"d"], object), "its targets have text"),
    ],
)
def test_targets_that_are_no_values_of_the_output_have_a_note_instead_of_residuals(targets: Any, said: str) -> None:
    """Such as the time of an event and whether it came, for a loss of one's own."""
    collector = TableCollector(
        {"risk": OutputTask(kind="unknown")}, [TensorSpec(name="risk", dtype="float32", shape=(None, 1))]
    )
    outputs = {"risk": np.arange(4, dtype=np.float32)[:, np.newaxis]}
    batch = Batch(inputs={"x": np.zeros((4, 1))}, targets={"targets": targets})
    for _ in range(2):
        collector.add(batch, ExampleScores(losses=np.arange(4.0), outputs=outputs), {"all": np.ones(4, bool)})
    document = collector.document()
    assert document["outputs"] == {}
    (note,) = document["notes"]
    assert re.match(f"there are no tables of 'risk': {said}", note)
    assert document["hardest"][0]["outputs"]["risk"]["predicted"] == [3.0]
