"""TensorFlow Serving's REST API, as its documentation describes it, over real HTTP.

Its server cannot be had from a registry; what it answers is from https://www.tensorflow.org/tfx/serving/api_rest.
"""

from __future__ import annotations

import gzip
import json
import re
from typing import Any

import httpx
import numpy as np
import pytest

from testkit.served import Pair
from testkit.values import DTYPES, EVERY, EVERY_STEP, PLAIN, packed, values

SECONDS = 60.0
X = [[1.0, 2.0, 3.0], [4, 5, 6]]
"""Examples for the model `PLAIN`, whose output is the input times the step."""
TIMES_3 = [[3.0, 6.0, 9.0], [12.0, 15.0, 18.0]]


def ask(served: Pair, place: str, body: Any = None, model: str = PLAIN) -> httpx.Response:
    """Send a body to a place of a model's path, or read it."""
    server = served.every if model == EVERY else served.plain
    url = f"http://{server.http}/v1/models/{model}{place}"
    if body is None:
        return httpx.get(url, timeout=SECONDS)
    return httpx.post(url, content=body if isinstance(body, bytes) else json.dumps(body), timeout=SECONDS)


def in_json(array: np.ndarray) -> Any:
    if array.dtype.kind == "O":
        return np.vectorize(bytes.decode, otypes=[object])(array).tolist()
    return (array.astype(np.float64) if array.dtype.name == "bfloat16" else array).tolist()


def of_json(values_of: Any, dtype: str) -> list[str]:
    """Return the bits of JSON's values as arrays of a dtype."""
    if dtype == "string":
        return [text.encode().hex() for text in np.array(values_of, object).ravel()]
    own = values(dtype).dtype
    return packed(np.array(values_of, np.float64 if "float" in dtype else own).astype(own))


@pytest.mark.parametrize("form", ["instances", "inputs"])
def test_every_datatype_comes_back_as_the_native_client_has_it(
    served: Pair, native_answer: dict[str, list[str]], form: str
) -> None:
    sent = {f"in_{dtype}": in_json(values(dtype)) for dtype in DTYPES}
    examples = [dict(zip(sent, row, strict=True)) for row in zip(*sent.values(), strict=True)]
    answer = ask(served, ":predict", {form: examples if form == "instances" else sent}, EVERY)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    for dtype in DTYPES:
        name = f"out_{dtype}"
        column = found["outputs"][name] if form == "inputs" else [row[name] for row in found["predictions"]]
        assert of_json(column, dtype) == native_answer[dtype]


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        ({"instances": X}, {"predictions": TIMES_3}),
        ({"instances": [{"x": row} for row in X]}, {"predictions": TIMES_3}),
        ({"inputs": X}, {"outputs": TIMES_3}),
        ({"inputs": {"x": X}, "signature_name": "serving_default"}, {"outputs": TIMES_3}),
    ],
)
def test_the_one_input_of_a_model_needs_no_name(served: Pair, body: Any, answer: Any) -> None:
    assert ask(served, ":predict", body).json() == answer


@pytest.mark.parametrize(
    ("place", "step"), [("/versions/1", 1), ("/versions/2", 2), ("/labels/latest", 3), ("/labels/serving", 3), ("", 3)]
)
def test_the_path_names_a_version_or_a_label(served: Pair, place: str, step: int) -> None:
    assert ask(served, f"{place}:predict", {"instances": [[1, 1, 1]]}).json() == {"predictions": [[step] * 3]}
    assert ask(served, f"{place}/metadata").json()["model_spec"]["version"] == str(step)


def test_a_large_compressed_body_is_answered(served: Pair) -> None:
    many = np.arange(12_000, dtype=np.float32).reshape(-1, 3)
    url = f"http://{served.plain.http}/v1/models/{PLAIN}:predict"
    body = gzip.compress(json.dumps({"instances": many.tolist()}).encode())
    answer = httpx.post(url, content=body, headers={"content-encoding": "gzip"}, timeout=SECONDS)
    assert answer.status_code == 200, answer.text
    assert answer.json()["predictions"] == (3 * many).tolist()


def test_the_status_of_one_version_or_of_all_is_told(served: Pair) -> None:
    fine = {"state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}}
    every = [{"version": version, **fine} for version in ("3", "2", "1")]
    assert ask(served, "").json() == {"model_version_status": every}
    assert ask(served, "/versions/2").json() == {"model_version_status": [every[1]]}
    assert ask(served, "/labels/serving").json() == {"model_version_status": [every[0]]}


def test_the_signature_says_what_a_version_takes_and_gives(served: Pair) -> None:
    found = ask(served, "/metadata", model=EVERY).json()
    assert found["model_spec"] == {"name": EVERY, "version": str(EVERY_STEP), "signature_name": ""}
    signature = found["metadata"]["signature_def"]["signature_def"]["serving_default"]
    assert signature["method_name"] == "tensorflow/serving/predict"
    assert signature["outputs"].keys() == {f"out_{dtype}" for dtype in DTYPES}
    assert signature["inputs"]["in_string"] == {
        "name": "in_string",
        "dtype": "DT_STRING",
        "tensor_shape": {"dim": [{"size": "-1", "name": ""}, {"size": "3", "name": ""}], "unknown_rank": False},
    }


@pytest.mark.parametrize(
    ("place", "body", "status", "sentence"),
    [
        (":predict", {}, 400, "either instances, the examples, or inputs, an array for each input; got neither"),
        (":predict", {"instances": X, "inputs": X}, 400, "got both"),
        (":predict", {"instances": []}, 400, "an array of at least one example"),
        (":predict", {"instances": 1}, 400, "an array of at least one example"),
        (":predict", {"instances": [[1, 2, 3], [4, 5]]}, 400, "'x': its arrays differ in length on axis 1"),
        (":predict", {"instances": [[1, 2, 3], 4]}, 400, "'x': its arrays differ in length on axis 1"),
        (":predict", {"instances": [[1, 2]]}, 400, r"'x' has shape \[1, 2\]; \[examples, 3\] was expected"),
        (":predict", {"instances": [["a", "b", "c"]]}, 400, "'x': data holds text; numbers was expected"),
        (":predict", {"instances": [[1, 2, {"b64": "AA=="}]]}, 400, "'x': data holds an object; numbers"),
        (
            ":predict",
            {"instances": [{"x": [1, 2, 3]}, {"y": 1}]},
            400,
            "example 1 .* the members of the first one, 'x'",
        ),
        (":predict", {"instances": [{"x": [1, 2, 3]}, [1, 2, 3]]}, 400, "example 1 of instances must be an object"),
        (":predict", {"instances": [{"z": [1, 2, 3]}]}, 400, "got the inputs 'z'; expected 'x'"),
        (":predict", {"instances": X, "signature_name": "train"}, 400, "no signature 'train'; there is"),
        (":predict", {"instances": X, "signature_name": 7}, 400, "signature_name is 7; text was expected"),
        (
            ":predict",
            {"instances": X, "signature_name": "\ud800"},
            400,
            r"signature_name is '\\ud800'; text was expected",
        ),
        (":predict", b"[1", 400, "the body is not JSON"),
        ("/versions/9:predict", {"instances": X}, 404, r"version 9 is not loaded; loaded are \[1, 2, 3\]"),
        ("/versions/x:predict", {"instances": X}, 400, "the version is 'x'; give a step"),
        ("/labels/stable:predict", {"instances": X}, 400, "'stable' is unknown; give serving, latest, best"),
        ("/labels/best:predict", {"instances": X}, 404, "no version is best yet"),
        (":classify", {"examples": []}, 501, "send the model's own inputs to Predict"),
        (":regress", {"examples": []}, 501, "send the model's own inputs to Predict"),
        ("/versions/9", None, 404, r"there is no version 9; there are \[3, 2, 1\]"),
        ("y", None, 404, f"there is no model '{PLAIN}y'; this server serves '{PLAIN}'"),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_sentence(
    served: Pair, place: str, body: Any, status: int, sentence: str
) -> None:
    answer = ask(served, place, body)
    assert (answer.status_code, answer.json().keys()) == (status, {"error"}), answer.text
    assert re.search(sentence, answer.json()["error"])


def test_a_model_with_several_inputs_needs_their_names(served: Pair) -> None:
    error = ask(served, ":predict", {"instances": [[1, 2, 3]]}, EVERY).json()["error"]
    assert "an example of instances must be an object with a member for each input of the model, 'in_bool', " in error
