"""Values of TensorFlow Serving's JSON become the model's arrays, and back."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.evaluator.types import TensorSpec
from understudy.service.rest.tfserving_json import PredictValues, parse_predict, render_predict
from understudy.wire import WireError

X = TensorSpec(name="x", dtype="float32", shape=(None, None))
TEXT = TensorSpec(name="text", dtype="string", shape=(None,))

LONG = "\U0010ffff" * 100_000

SHAPES = arrays.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=20)


def parsed(request: Any, *specs: TensorSpec) -> PredictValues:
    return parse_predict(json.dumps(request).encode(), specs, lambda _: None)


@given(
    array=arrays.arrays(st.sampled_from([np.float32, np.float64, np.int64, np.uint64, np.bool_]), SHAPES),
    form=st.sampled_from(["instances", "inputs"]),
)
def test_what_is_rendered_is_read_as_the_same_array(array: np.ndarray, form: str) -> None:
    rendered = json.loads(render_predict({"x": array}, by_example=form == "instances"))
    (values,) = rendered.values()
    spec = TensorSpec(name="x", dtype=array.dtype.name, shape=(None,) * array.ndim)
    found = parsed({form: values}, spec)
    assert found.by_example == (form == "instances")
    assert found.inputs["x"].dtype == array.dtype
    np.testing.assert_array_equal(found.inputs["x"], array)


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=20))
def test_bytes_are_sent_in_base64_and_come_in_base64_where_the_name_says_so(contents: list[bytes]) -> None:
    outputs = {"kept_bytes": np.array(contents, object), "number": np.arange(len(contents))}
    rows = json.loads(render_predict(outputs, by_example=True))["predictions"]
    assert [row["number"] for row in rows] == [*range(len(contents))]
    for instances in ([row["kept_bytes"] for row in rows], [{"text": row["kept_bytes"]} for row in rows]):
        assert parsed({"instances": instances}, TEXT).inputs["text"].tolist() == contents
    columns = json.loads(render_predict(outputs, by_example=False))["outputs"]
    assert parsed({"inputs": columns["kept_bytes"]}, TEXT).inputs["text"].tolist() == contents


def test_text_stands_for_its_bytes() -> None:
    assert parsed({"instances": ["grüße", ""]}, TEXT).inputs["text"].tolist() == ["grüße".encode(), b""]
    outputs = {"greeting": np.array([["grüße".encode()], [b""]], object)}
    assert json.loads(render_predict(outputs, by_example=True)) == {"predictions": [["grüße"], [""]]}


def test_bytes_that_are_no_text_are_refused_where_the_name_does_not_say_so() -> None:
    with pytest.raises(InvalidInputError, match="output 'kept' has bytes that are not UTF-8 text"):
        render_predict({"kept": np.array([b"\xff"], object)}, by_example=True)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([1], r'neither text nor {"b64": TEXT}'),
        ([{"b64": 1}], r'neither text nor {"b64": TEXT}'),
        ([{"b64": "?"}], "cannot be decoded"),
        (["\ud800"], "cannot be decoded"),
    ],
)
def test_what_is_no_text_is_refused(values: Any, words: str) -> None:
    with pytest.raises(WireError, match=f"input 'text': an element .*{words}"):
        parsed({"inputs": values}, TEXT)


@pytest.mark.parametrize(
    "request_body",
    [
        {"inputs": {LONG: [["a"]]}},
        {"instances": [{LONG: ["a"]}]},
        {"instances": [["a"]], "signature_name": LONG},
    ],
)
def test_a_name_of_megabytes_is_refused_without_being_quoted(request_body: Any) -> None:
    with pytest.raises(InvalidInputError, match=f"has {len(LONG)} characters; 65536 is the limit"):
        parsed(request_body, TEXT)


@given(st.recursive(st.integers(0, 9), lambda inner: st.lists(inner, max_size=3), max_leaves=12))
def test_nested_arrays_are_taken_if_numpy_takes_them_and_refused_otherwise(values: Any) -> None:
    request = {"inputs": {"x": values}}
    try:
        expected = np.array(values, np.float32)
    except ValueError:
        with pytest.raises(WireError, match="differ in length"):
            parsed(request, X)
    else:
        np.testing.assert_array_equal(parsed(request, X).inputs["x"], expected)
