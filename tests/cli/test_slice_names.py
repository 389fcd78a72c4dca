"""Names and values of slices are the same from the command line through the gate to tables and files."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from understudy.checkpoints.signature import TensorSpec
from understudy.cli.arrays import examples_to_score
from understudy.cli.output import csv_cell, printable
from understudy.cli.values import value_type
from understudy.evaluator.evaluation.slices import SliceError, Slicer, parse_slices
from understudy.evaluator.evaluator_errors import ConfigurationError
from understudy.evaluator.serving.gates import parse_gate
from understudy.evaluator.types import Arrays

SPECIAL = st.text(st.sampled_from(";,=]*[:\"'<> \n\t\\ab3é\u00a0\u200b\u2028"), max_size=12)
TEXTS = st.one_of(SPECIAL, st.text(max_size=12))


def escaped(text: str, special: str) -> str:
    for each in special:
        text = text.replace(each, f"\\{each}")
    return text


def typed(*texts: str) -> tuple[str, ...]:
    """Return what the options of `understudy serve` make of several values in one text."""
    value = value_type(tuple[str, ...], separator=";")
    assert value.combine is not None
    found: tuple[str, ...] = value.combine((value.param_type.convert(";".join(texts), None, None),))
    return found


def slices_of(setting: str, columns: Arrays) -> list[str]:
    slicer = Slicer(settings=parse_slices([setting]))
    (members,) = slicer.members(slicer.values({}, {}, columns))
    return [*members.names]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=3, unique=True))
@example([("x", "y,b=z"), ("x,b=y", "z")])
@example([("a\nb", ""), ("a\\nb", ""), ('"a\\nb"', "")])
@example([("] >= 1", " "), ("", "")])
def test_each_pair_of_values_has_a_name_of_its_own_that_a_gate_reads(pairs: list[tuple[str, str]]) -> None:
    columns = {
        name: np.array([value.encode(errors="surrogatepass") for value in values], object)
        for name, values in zip("ab", zip(*pairs, strict=True), strict=True)
    }
    names = slices_of("a*b", columns)
    assert len(set(names)) == len(names) == len(pairs)
    given_slices = [("a",), ("b",), ("a", "b")]
    for name in (*names, *slices_of("a", columns)):
        assert printable(name) == name
        (text,) = typed(f"test/accuracy[{escaped(name, ';')}] >= 0.9 at 95%")
        condition = parse_gate(text, datasets=["test"], modes={}, slices=given_slices)
        assert (condition.metric, condition.slice_name, condition.number) == ("accuracy", name, 0.9)
        assert json.loads(json.dumps(name)) == name
        file = io.StringIO()
        csv.writer(file, lineterminator="\n").writerow([csv_cell(name)])
        assert next(csv.reader(io.StringIO(file.getvalue(), newline=""))) == [name]


@settings(max_examples=100, deadline=None)
@given(TEXTS, TEXTS)
@example("geo:country", "a;b")
@example("a*b", ":")
def test_each_name_of_a_feature_can_be_written(first: str, second: str) -> None:
    assume(first != second and "label" not in (first, second) and "predicted" not in (first, second))
    assume(all(name and name == name.strip() and "\\" not in name for name in (first, second)))
    columns = {first: np.array([1]), second: np.array([2])}
    setting = "*".join(escaped(name, "*:;") for name in (first, second))
    for texts in (typed(setting, "label"), (setting, "label")):
        both, label = parse_slices(texts)
        assert [feature.name for feature in both.features] == [first, second]
        assert label.features[0].name == "label"
    (name,) = slices_of(setting, columns)
    assert name == f"{first}=1,{second}=2"
    if "[" not in name:
        (text,) = typed(f"test/accuracy[{escaped(name, ';')}] >= 0.9")
        assert parse_gate(text, datasets=["test"], modes={}, slices=[(first, second)]).slice_name == name


def test_what_has_a_separator_without_a_backslash_is_refused_with_how_to_write_it() -> None:
    first, _ = typed("test/accuracy[country=a;b] >= 0.9")
    with pytest.raises(ConfigurationError, match=r"write a semicolon within it as \\;"):
        parse_gate(first, datasets=["test"], modes={}, slices=[("country",)])
    with pytest.raises(SliceError, match=r"write a colon of a name as \\:"):
        parse_slices(["geo:country"])
    with pytest.raises(SliceError, match=r"write an asterisk of a name as \\\*"):
        parse_slices(["a*b*c"])


def test_bytes_that_are_no_text_have_names_of_their_own() -> None:
    names = slices_of("a", {"a": np.array([b"\xff", b"\\xff", b"\xfe"], object)})
    assert len(set(names)) == 3
    assert all(printable(name) == name for name in names)


def test_a_file_may_have_the_features_whose_names_have_separators(tmp_path: Path) -> None:
    one = np.ones((2, 1), np.float32)
    features = {"geo:country": np.array([1, 2]), "a*b": np.array([3, 4])}
    np.savez(tmp_path / "examples.npz", allow_pickle=False, x=one, y=one, **features)
    spec = TensorSpec(name="x", dtype="float32", shape=(None, 1))
    metadata: Any = SimpleNamespace(inputs=[spec], outputs=[replace(spec, name="y")])
    found = examples_to_score(tmp_path / "examples.npz", metadata, ["geo\\:country:1.5*a\\*b"])
    assert {name: values.tolist() for name, values in found.features.items()} == {
        name: values.tolist() for name, values in features.items()
    }
