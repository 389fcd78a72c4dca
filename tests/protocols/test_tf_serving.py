"""The stubs of tensorflow-serving-api make every call they have; see `calls/tfserving.py` for what the report holds."""

from __future__ import annotations

import re

import pytest
from protocols.conftest import Report

from testkit.fetched import INSTALL_SECONDS
from testkit.values import DTYPES, EVERY_STEP, PLAIN, packed, values

pytestmark = pytest.mark.timeout(INSTALL_SECONDS + 60)

REFUSALS = {
    "another model": ("NOT_FOUND", f"there is no model 'nobody'; this server serves '{PLAIN}'"),
    "another signature": ("INVALID_ARGUMENT", "no signature 'train'; there is 'serving_default'"),
    "another field": ("INVALID_ARGUMENT", r"metadata_field is \['weights'\]; there is \['signature_def'\]"),
    "version 99": ("NOT_FOUND", r"version 99 is not loaded; loaded are \[1, 2, 3\]"),
    "version -1": ("INVALID_ARGUMENT", "a step is a number from 0 up"),
    "label best": ("NOT_FOUND", "no version is best yet"),
    "label stable": ("INVALID_ARGUMENT", "'stable' is unknown; give serving, latest, best"),
    "unknown output": ("INVALID_ARGUMENT", "there is no output 'z'; there is 'y'"),
    "no examples": ("INVALID_ARGUMENT", "input 'x' has no examples"),
    "status of 99": ("NOT_FOUND", r"there is no version 99; there are \[3, 2, 1\]"),
    "Classify": ("UNIMPLEMENTED", "send the model's own inputs to Predict"),
    "Regress": ("UNIMPLEMENTED", "send the model's own inputs to Predict"),
    "MultiInference": ("UNIMPLEMENTED", "send the model's own inputs to Predict"),
    "HandleReloadConfigRequest": ("UNIMPLEMENTED", "the evaluator decides what is loaded"),
}
TENSORFLOW_NAMES = {"float16": "DT_HALF", "float32": "DT_FLOAT", "float64": "DT_DOUBLE"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_datatype_comes_back_as_the_native_client_has_it(
    tf_serving: Report, native_answer: dict[str, list[str]], dtype: str
) -> None:
    assert tf_serving["every"][dtype] == native_answer[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_element_may_stand_for_a_whole_tensor(tf_serving: Report, dtype: str) -> None:
    assert tf_serving["filled"][dtype] == packed(values(dtype)[2, 2:]) * 3


@pytest.mark.parametrize("call", REFUSALS)
def test_what_cannot_be_done_is_refused_with_a_sentence(tf_serving: Report, call: str) -> None:
    status, sentence = REFUSALS[call]
    assert tf_serving[call]["status"] == status
    assert re.search(sentence, tf_serving[call]["message"])


@pytest.mark.parametrize(("call", "version"), [("predict", 3), ("signature", 3), ("version 1", 1), ("label latest", 3)])
def test_a_response_names_its_version(tf_serving: Report, call: str, version: int) -> None:
    spec = tf_serving[call]["value"]["model_spec"]
    assert spec == {"name": PLAIN, "version": str(version), "signature_name": "serving_default"}


def test_only_the_outputs_in_the_filter_come(tf_serving: Report) -> None:
    assert tf_serving["filtered"] == ["out_bool", "out_int8"]


def test_the_signature_says_what_a_version_takes_and_gives(tf_serving: Report) -> None:
    assert tf_serving["described version"] == EVERY_STEP
    signature = tf_serving["signatures"]["signature_def"]["serving_default"]
    assert signature["method_name"] == "tensorflow/serving/predict"
    assert signature["outputs"].keys() == {f"out_{dtype}" for dtype in DTYPES}
    for dtype in DTYPES:
        assert signature["inputs"][f"in_{dtype}"] == {
            "name": f"in_{dtype}",
            "dtype": TENSORFLOW_NAMES.get(dtype, f"DT_{dtype.upper()}"),
            "tensor_shape": {"dim": [{"size": "-1"}, {"size": "3"}]},
        }


def test_the_status_of_one_version_or_of_all_is_told(tf_serving: Report) -> None:
    every = tf_serving["status"]["value"]["model_version_status"]
    assert every == [{"version": version, "state": "AVAILABLE"} for version in ("3", "2", "1")]
    assert tf_serving["status of 2"]["value"]["model_version_status"] == [every[1]]
