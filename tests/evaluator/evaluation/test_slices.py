from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from understudy.evaluator.evaluation import slices
from understudy.evaluator.evaluation.slices import QuantileSample, SliceError, Slicer, number_values, parse_slices
from understudy.evaluator.types import OutputTask, TaskKind

TARGETS = {"outputs": np.array([[3], [1], [3], [3]])}
PREDICTED = {"outputs": np.array([3, 3, 1, 3])}
COLUMNS: dict[str, Any] = {
    "age": np.array([17.0, 18.0, 64.9, np.nan]),
    "country": np.array([b"FR", b"DE", b"FR", "Åland".encode()], dtype=object),
    "is_new": np.array([[True], [False], [True], [True]])[:, 0],
    "pixels": np.zeros((4, 2, 2)),
}


def found(*texts: str, slicer: Slicer | None = None) -> dict[str, list[int]]:
    slicer = slicer or Slicer(settings=parse_slices(texts))
    return {
        name: rows.tolist()
        for members in slicer.members(slicer.values(TARGETS, PREDICTED, COLUMNS))
        for name, rows in members.rows()
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("label", {"label=1": [1], "label=3": [0, 2, 3]}),
        ("predicted", {"predicted=1": [2], "predicted=3": [0, 1, 3]}),
        ("country", {"country=DE": [1], "country=FR": [0, 2], "country=Åland": [3]}),
        ("is_new", {"is_new=False": [1], "is_new=True": [0, 2, 3]}),
        ("age:18, 30,65", {"age<18": [0], "age=[18,30)": [1], "age=[30,65)": [2], "age=NaN": [3]}),
        ("age:18", {"age<18": [0], "age>=18": [1, 2], "age=NaN": [3]}),
        ("age", {"age=17": [0], "age=18": [1], "age=64.9": [2], "age=NaN": [3]}),
        (
            "country * label",
            {"country=DE,label=1": [1], "country=FR,label=3": [0, 2], "country=Åland,label=3": [3]},
        ),
    ],
)
def test_examples_are_found_in_their_slices(text: str, expected: dict[str, list[int]]) -> None:
    assert found(text) == expected


@pytest.mark.parametrize("text", ["dose", "dose:0.7,36.6", "dose:q2"])
def test_a_feature_has_the_same_slices_in_single_and_double_precision(text: str) -> None:
    doses = np.array([36.6, 0.1, 0.3, 0.7])
    names = []
    for dtype in (np.float64, np.float32):
        setting = parse_slices([text])
        sample = QuantileSample()
        sample.add(doses.astype(dtype))
        slicer = Slicer(settings=slices.resolved(setting, {"dose": sample}) if ":q" in text else setting)
        (members,) = slicer.members(slicer.values({}, {}, {"dose": doses.astype(dtype)}))
        names.append({name: rows.tolist() for name, rows in members.rows()})
    assert names[0] == names[1]
    assert {"dose=0.1", "dose=[0.7,36.6)", "dose>=0.7"} & names[0].keys()


def test_a_feature_of_one_value_has_any_number_of_axes() -> None:
    columns = {"word": np.array([[b"red"], [b"blue"]], object), "age": np.array([[[3]], [[5]]])}
    slicer = Slicer(settings=parse_slices(["word", "age:4"]))
    names = [members.names for members in slicer.members(slicer.values({}, {}, columns))]
    assert names == [["word=blue", "word=red"], ["age<4", "age>=4"]]
    assert number_values(parse_slices(["age:q2"])[0].features[0], {}, columns, {}).tolist() == [3, 5]


def test_one_hot_targets_are_classes() -> None:
    targets = {"outputs": np.eye(4, dtype=np.float32)[[3, 0]]}
    slicer = Slicer(settings=parse_slices(["label"]))
    (members,) = slicer.members(slicer.values(targets, {}, {}))
    assert [name for name, _ in members.rows()] == ["label=0", "label=3"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("age:30,18", r"'age:30,18': the edges 30,18 do not ascend"),
        ("age:1,1", "do not ascend"),
        ("age:old", r"the buckets 'old' are neither edges such as 18,30,65 nor quantiles such as q4"),
        ("age:q1", "has 1 quantiles; give 2 to 100"),
        ("a*b*c", r"'a\*b\*c' is not a feature or two"),
        ("", "is not a feature or two"),
        ("age*age:3", "crosses 'age' with itself"),
        ("predicted:q2", "the quantiles of 'predicted' differ from version to version; give edges"),
        ("age*predicted/kind:q2", "the quantiles of 'predicted/kind' differ"),
    ],
)
def test_a_setting_that_cannot_be_used_is_refused_with_its_text(text: str, complaint: str) -> None:
    with pytest.raises(SliceError, match=complaint):
        parse_slices([text])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("cuntry", "no feature 'cuntry' to slice by; there are label, predicted, age, country, is_new, pixels"),
        ("pixels", r"'pixels' has shape \[examples, 2, 2\]; a slice needs one value for each example"),
        ("country:1,2", "'country' holds text, not numbers, so it has no buckets"),
        ("label/other", "no feature 'label/other'"),
    ],
)
def test_a_feature_that_does_not_fit_is_refused_with_what_there_is(text: str, complaint: str) -> None:
    with pytest.raises(SliceError, match=complaint):
        found(text)
    lenient = Slicer(settings=parse_slices([text, "label"]), lenient=True)
    for _ in range(2):
        assert found(slicer=lenient) == {"label=1": [1], "label=3": [0, 2, 3]}
    (note,) = lenient.notes
    assert note.startswith(f"slice {text!r} is left out: ")


def test_without_predicted_classes_there_is_no_slice_by_them() -> None:
    slicer = Slicer(settings=parse_slices(["predicted"]))
    with pytest.raises(
        SliceError, match=r"because the model scores .*, and its outputs are not kept; there are label, age$"
    ):
        slicer.values({"y": np.zeros(2)}, None, {"age": np.zeros(2)})


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("multilabel", "because 'y' has several labels for an example, not one class"),
        ("regression", "because 'y' has numbers, not classes"),
        ("sparse", "because 'y' has several classes for an example, not one class"),
    ],
)
@pytest.mark.parametrize("name", ["predicted", "predicted/y"])
def test_an_output_without_one_class_says_why(kind: TaskKind, reason: str, name: str) -> None:
    slicer = Slicer(settings=parse_slices([name]), tasks={"y": OutputTask(kind=kind)})
    with pytest.raises(SliceError, match=f"{reason}; there are label, age$"):
        slicer.values({"y": np.zeros(2)}, {}, {"age": np.zeros(2)})


def test_several_classes_of_an_example_are_no_slice() -> None:
    targets = {"outputs": np.array([[1, 1], [0, 1]])}
    with pytest.raises(SliceError, match="several classes or none"):
        Slicer(settings=parse_slices(["label"])).values(targets, {}, {})


@pytest.mark.parametrize("kind", ["sparse", "binary", "regression"])
def test_several_targets_of_an_example_are_no_class_even_if_one_alone_is_not_zero(kind: TaskKind) -> None:
    targets = {"outputs": np.array([[0, 1, 0], [2, 0, 0]])}
    slicer = Slicer(settings=parse_slices(["label"]), tasks={"outputs": OutputTask(kind=kind)})
    with pytest.raises(SliceError, match=r"'label' has shape \[examples, 3\]; a slice needs one value"):
        slicer.values(targets, {}, {})
    with pytest.raises(SliceError, match="has shape"):
        number_values(parse_slices(["label:q2"])[0].features[0], targets, {}, slicer.tasks)


def test_too_many_values_are_refused_with_their_number() -> None:
    slicer = Slicer(settings=parse_slices(["user", "label"]))
    for start in range(0, 3000, 600):
        values = slicer.values({"y": np.zeros(600, int)}, {}, {"user": np.arange(start, start + 600)})
        kept = [members.setting for members in slicer.members(values)]
    assert kept == ["label"]
    refused = slicer.refused()["user"]
    assert "has 3000 values, and at most 1000 are scored" in refused
    assert ":q" not in refused  # which a stream of batches does not have


def test_quantiles_have_equally_many_examples_in_constant_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "_SAMPLE", 1000)
    sample = QuantileSample()
    values = np.random.default_rng(1).normal(size=20_000)
    for part in np.split(values, 40):
        sample.add(part)
    edges = sample.edges(4)
    assert sum(map(len, sample._kept)) <= 1000
    np.testing.assert_allclose(edges, np.quantile(values, [0.25, 0.5, 0.75]), atol=0.1)
    assert QuantileSample().edges(4) == (0.0,)
