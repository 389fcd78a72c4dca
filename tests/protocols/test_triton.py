"""tritonclient, over gRPC and HTTP, makes every call it has; see `calls/triton.py` for what the reports hold."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from protocols.conftest import Fetch, Report, triton_report

from testkit.fetched import INSTALL_SECONDS
from testkit.served import Pair
from testkit.values import DTYPES, EVERY, EVERY_STEP, PLAIN, packed, values
from understudy.clients import Client
from understudy.evaluator.settings import DEFAULT_MAX_BATCH_SIZE

pytestmark = pytest.mark.timeout(INSTALL_SECONDS + 60)

STATUS = {
    "INVALID_ARGUMENT": "400",
    "NOT_FOUND": "404",
    "UNIMPLEMENTED": "501",
    "DEADLINE_EXCEEDED": "504",
}
"""The HTTP status for each gRPC status."""

REFUSALS = {
    "metadata of another": ("NOT_FOUND", f"there is no model 'nobody'; this server serves '{PLAIN}'"),
    "another model": ("NOT_FOUND", f"there is no model 'nobody'; this server serves '{PLAIN}'"),
    "version 99": ("NOT_FOUND", r"version 99 is not loaded; loaded are \[1, 2, 3\]"),
    "version best": ("NOT_FOUND", "no version is best yet"),
    "version -1": ("INVALID_ARGUMENT", "the version is '-1'; give a step .*or serving, latest, best"),
    "metadata of no version": ("INVALID_ARGUMENT", "the version is 'newest'; give a step"),
    "timed out": ("DEADLINE_EXCEEDED", "deadline"),
    "sequence": ("UNIMPLEMENTED", "sequences are not supported"),
    "classification": ("UNIMPLEMENTED", "tensor 'y'.*classification is not supported"),
    "unknown output": ("INVALID_ARGUMENT", "there is no output 'z'; there is 'y'"),
    "unknown input": ("INVALID_ARGUMENT", "got the inputs 'z'; expected 'x'"),
    "another datatype": ("INVALID_ARGUMENT", "input 'x' has dtype int32; float32 was expected"),
    "another shape": ("INVALID_ARGUMENT", r"input 'x' has shape \[2, 4\]; \[examples, 3\] was expected"),
    "no examples": ("INVALID_ARGUMENT", "input 'x' has no examples"),
    "load_model": ("UNIMPLEMENTED", "the evaluator decides what is loaded"),
    "unload_model": ("UNIMPLEMENTED", "the evaluator decides what is loaded"),
    "system status": ("UNIMPLEMENTED", "shared memory is not supported"),
    "system register": ("UNIMPLEMENTED", "shared memory is not supported"),
    "system unregister": ("UNIMPLEMENTED", "shared memory is not supported"),
    "cuda status": ("UNIMPLEMENTED", "shared memory is not supported"),
    "cuda register": ("UNIMPLEMENTED", "shared memory is not supported"),
    "cuda unregister": ("UNIMPLEMENTED", "shared memory is not supported"),
    "get trace": ("UNIMPLEMENTED", "tracing is not supported"),
    "update trace": ("UNIMPLEMENTED", "tracing is not supported"),
    "get log": ("UNIMPLEMENTED", "log settings are fixed when the server starts"),
    "update log": ("UNIMPLEMENTED", "log settings are fixed when the server starts"),
    "shared memory input": ("UNIMPLEMENTED", "tensor 'x'.*shared memory is not supported"),
    "shared memory output": ("UNIMPLEMENTED", "tensor 'y'.*shared memory is not supported"),
}


@pytest.fixture(scope="session", params=["grpc", "http"])
def report(request: pytest.FixtureRequest, served: Pair, fetch: Fetch) -> Report:
    return triton_report(request.param, served, fetch)


def over_grpc(report: Report) -> bool:
    return "stream" in report


def value(report: Report, call: str) -> Any:
    """Return what a call returned, numbers written as text (as protobuf's JSON has them) as numbers."""
    return _with_numbers(report[call]["value"])


def _with_numbers(answer: Any) -> Any:
    if isinstance(answer, dict):
        return {
            key: each if key in ("version", "model_version") else _with_numbers(each) for key, each in answer.items()
        }
    if isinstance(answer, list):
        return [_with_numbers(each) for each in answer]
    return int(answer) if isinstance(answer, str) and re.fullmatch(r"-?\d+", answer) else answer


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_datatype_comes_back_as_the_native_client_has_it(
    report: Report, native_answer: dict[str, list[str]], dtype: str
) -> None:
    assert native_answer[dtype] == packed(values(dtype))
    assert report["every"][dtype] == native_answer[dtype]
    assert report["asyncio"][dtype] == native_answer[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_json_changes_no_bit(triton_http: Report, native_answer: dict[str, list[str]], dtype: str) -> None:
    assert triton_http["json"][dtype] == native_answer[dtype]


@pytest.mark.parametrize("call", REFUSALS)
def test_what_cannot_be_done_is_refused_with_a_sentence(report: Report, call: str) -> None:
    status, sentence = REFUSALS[call]
    assert report[call]["status"] == (f"StatusCode.{status}" if over_grpc(report) else STATUS[status])
    assert re.search(sentence, report[call]["message"])


def test_it_says_what_server_this_is_and_whether_it_is_ready(report: Report) -> None:
    assert value(report, "server metadata")["name"] == "understudy"
    assert [report[call]["value"] for call in ("live", "ready", "model ready", "model ready 1")] == [True] * 4
    assert [report[call]["value"] for call in ("model ready best", "model ready 99")] == [False] * 2


def test_it_describes_the_model(report: Report) -> None:
    assert value(report, "metadata") == {
        "name": PLAIN,
        "versions": [1, 2, 3],
        "platform": "keras",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 3]}],
    }
    described = {spec["name"]: spec["datatype"] for spec in value(report, "metadata of every")["inputs"]}
    assert described == {f"in_{dtype}": datatype for dtype, datatype in DTYPES.items()}


def test_it_tells_how_the_model_is_run(report: Report) -> None:
    config = value(report, "config")["config"] if over_grpc(report) else value(report, "config")
    assert config["max_batch_size"] == DEFAULT_MAX_BATCH_SIZE
    assert config["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": [3]}]
    assert config["output"] == [{"name": "y", "data_type": "TYPE_FP32", "dims": [3]}]
    assert config["instance_group"][0]["count"] == 2


def test_it_lists_every_version(report: Report) -> None:
    index = value(report, "index")["models"] if over_grpc(report) else value(report, "index")
    assert [(entry["version"], entry["state"]) for entry in index] == [("3", "READY"), ("2", "READY"), ("1", "READY")]


def test_a_response_names_its_request_and_its_version(report: Report) -> None:
    assert report["response"] == {"model_name": EVERY, "model_version": str(EVERY_STEP), "id": "seven"}
    versions = {call: report[f"version {call}"]["value"]["model_version"] for call in ("serving", "latest", "3")}
    assert set(versions.values()) == {"3"}


def test_only_the_outputs_asked_for_come_in_that_order(report: Report) -> None:
    assert report["wanted"] == ["out_int8", "out_bool"]


def test_a_generous_timeout_and_a_priority_change_nothing(report: Report) -> None:
    assert report["timeout and priority"]["value"]["model_name"] == PLAIN


@pytest.mark.parametrize("way", ["gzip", "deflate", "asynchronous"])
def test_every_way_to_ask_gives_the_same(report: Report, native_plain: Client, way: str) -> None:
    assert report[way] == packed(native_plain.predict(np.ones((2, 3), np.float32)).output)


def test_a_stream_keeps_its_order_and_one_bad_request_does_not_end_it(triton_grpc: Report) -> None:
    expected: list[Any] = [[str(number), 3.0 * number, {}] for number in range(20)]
    expected[3][2] = {"triton_final_response": {"bool_param": True}}
    expected[7] = "got the inputs 'z'; expected 'x'"
    assert triton_grpc["stream"] == expected
    assert triton_grpc["asyncio stream"] == [0.0, 3.0, 6.0, 9.0, 12.0]


def test_statistics_count_every_batch_by_its_size(report: Report) -> None:
    (stats,) = value(report, "statistics")["model_stats"]
    sizes = {entry["batch_size"]: entry["compute_infer"] for entry in stats["batch_stats"]}
    assert sizes[303]["count"] >= 1
    assert sizes[301]["count"] == 2 * sizes[303]["count"]
    assert all(times["ns"] > 0 for times in sizes.values())
    assert stats["execution_count"] == sum(times["count"] for times in sizes.values())
    assert stats["inference_count"] == sum(size * times["count"] for size, times in sizes.items())
    assert stats["inference_stats"]["success"]["count"] >= stats["execution_count"]
    assert stats["inference_stats"]["success"]["ns"] > stats["inference_stats"]["compute_infer"]["ns"]
    everything = value(report, "statistics of all")["model_stats"]
    assert [entry["version"] for entry in everything] == ["3", "2", "1"]
