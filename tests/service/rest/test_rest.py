"""The REST application over an evaluator that does what a test tells it to."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import threading
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette

from testkit.scripted_evaluator import ScriptedEvaluator, inference_handler, prediction
from understudy.evaluator.evaluator_errors import InvalidInputError, NotReadyError, OverloadedError
from understudy.evaluator.types import Prediction
from understudy.service.calls.body_budget import BodyBudget
from understudy.service.calls.metrics import new_registry
from understudy.service.calls.served_call import served_methods
from understudy.service.handlers.status_handlers import MetricsHandler
from understudy.service.readiness import Readiness
from understudy.service.rest import json_values as elements
from understudy.service.rest.infer_json import parse_infer
from understudy.service.rest.json_values import MAX_BYTES_AT_ONCE, let_go, read_json
from understudy.service.rest.rest_app import RestApp
from understudy.service.rest.rest_routes import RestRoutes
from understudy.service.services import inference_service, metrics_service, plain_codecs
from understudy.wire import WireError

MAX_BYTES = 1000
INFER = "/v2/models/model/infer"

Ask = Callable[..., Awaitable[httpx.Response]]


@pytest.fixture
async def evaluator() -> ScriptedEvaluator:
    return ScriptedEvaluator()


@pytest.fixture
async def readiness() -> Readiness:
    return Readiness()


@asynccontextmanager
async def serving(
    evaluator: ScriptedEvaluator, readiness: Readiness, executor: ThreadPoolExecutor, *, max_bytes: int
) -> AsyncIterator[httpx.AsyncClient]:
    handler = inference_handler(evaluator, readiness, executor)
    registry = new_registry()
    metrics = MetricsHandler(registry, executor=executor)
    methods = served_methods([inference_service(handler, plain_codecs()), metrics_service(metrics)], registry)
    routes = RestRoutes(methods, max_body_bytes=max_bytes, bodies=BodyBudget(2 * max_bytes), executor=executor)
    rest_app = RestApp(handler, metrics, routes, readiness=readiness)
    app = Starlette(routes=rest_app.routes())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        yield client


@pytest.fixture
async def client(
    evaluator: ScriptedEvaluator, readiness: Readiness, executor: ThreadPoolExecutor
) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(evaluator, readiness, executor, max_bytes=MAX_BYTES) as client:
        yield client


@pytest.fixture
async def large_client(
    evaluator: ScriptedEvaluator, readiness: Readiness, executor: ThreadPoolExecutor
) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(evaluator, readiness, executor, max_bytes=1 << 24) as client:
        yield client


@pytest.fixture
def ask(client: httpx.AsyncClient, evaluator: ScriptedEvaluator) -> Ask:
    """Return what sends a request to infer and lets the model give certain outputs."""

    async def ask(outputs: dict[str, Any], **request: Any) -> httpx.Response:
        asking = asyncio.create_task(client.post(INFER, **request))
        future = await evaluator.predictions.get()
        future.set_result(Prediction(outputs=outputs, step=5))
        return await asking

    return ask


def tensor(data: Any, datatype: str = "FP32", shape: Any = (1, 2), **more: Any) -> dict[str, Any]:
    return {"name": "x", "datatype": datatype, "shape": list(shape), "data": data, **more}


def body(*inputs: Any, **more: Any) -> dict[str, Any]:
    return {"inputs": list(inputs), **more}


@pytest.mark.parametrize("data", [[1, 2.5], [[1, 2.5]], [[[1], [2.5]]]])
async def test_data_may_be_flat_or_nested(ask: Ask, evaluator: ScriptedEvaluator, data: Any) -> None:
    answer = await ask({"y": np.array([[0.1]], np.float32)}, json=body(tensor(data), id="7"))
    np.testing.assert_array_equal(evaluator.asked["inputs"]["x"], np.array([[1, 2.5]], np.float32))
    assert answer.json() == {
        "id": "7",
        "model_name": "model",
        "model_version": "5",
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 1], "data": [0.10000000149011612]}],
    }


async def test_not_a_number_and_infinity_come_as_most_json_readers_know_them(ask: Ask) -> None:
    outputs = {"y": np.array([[np.nan, np.inf, -np.inf]], np.float16)}
    answer = await ask(outputs, content=json.dumps(body(tensor([np.nan, -np.inf]))))
    assert '"data":[NaN,Infinity,-Infinity]' in answer.text


async def test_binary_data_goes_both_ways(ask: Ask, evaluator: ScriptedEvaluator) -> None:
    header = json.dumps(
        {
            "inputs": [
                {"name": "x", "datatype": "INT16", "shape": [1, 2], "parameters": {"binary_data_size": 4}},
                {"name": "t", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 6}},
            ],
            "outputs": [{"name": "y", "parameters": {"binary_data": True}}, {"name": "z"}],
        }
    ).encode()
    answer = await ask(
        {"z": np.array([[True]]), "y": np.array([[b"ab"]], dtype=object)},
        content=header + b"\1\0\2\0" + b"\2\0\0\0hi",
        headers={"Inference-Header-Content-Length": str(len(header))},
    )
    assert evaluator.asked["inputs"]["x"].tolist() == [[1, 2]]
    assert evaluator.asked["inputs"]["t"].tolist() == [b"hi"]
    length = int(answer.headers["inference-header-content-length"])
    assert answer.content[length:] == b"\2\0\0\0ab"
    first, second = json.loads(answer.content[:length])["outputs"]
    assert first == {"name": "y", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": 6}}
    assert second == {"name": "z", "datatype": "BOOL", "shape": [1, 1], "data": [True]}


async def test_all_outputs_may_be_asked_for_as_binary_data(ask: Ask) -> None:
    request = body(tensor([1, 2]), parameters={"binary_data_output": True})
    answer = await ask({"y": np.array([[1]], np.uint8)}, json=request)
    assert answer.content.endswith(b"\1")


@pytest.mark.parametrize(("coding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
async def test_a_body_may_be_compressed(
    ask: Ask, evaluator: ScriptedEvaluator, coding: str, compress: Callable[[bytes], bytes]
) -> None:
    content = compress(json.dumps(body(tensor([1, 2]))).encode())
    answer = await ask({"y": np.zeros((1, 1))}, content=content, headers={"content-encoding": coding})
    assert answer.status_code == 200
    assert evaluator.asked["inputs"]["x"].tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        ("{", "the body is not JSON"),
        ("[" * 900, "the body is not JSON"),
        ("[]", "the body is JSON, but not an object"),
        (body(3), "the request: inputs is .*an array of objects was expected"),
        (body({"datatype": "FP32"}), "input 0: name is None; text was expected"),
        (body(tensor([1, 2], shape=[1.5])), "input 'x': shape is .*whole numbers"),
        (body(tensor([1, 2], shape=[2**70])), "input 'x': shape is .*whole numbers"),
        (body(tensor([1, 2], shape=[-1, 2])), r"input 'x': shape \[-1, 2\] has a negative length"),
        (body(tensor([1, 2, 3])), r"input 'x': shape \[1, 2\] needs 2 elements in data, but got more"),
        (body(tensor([1, "2"])), "input 'x': data holds text; numbers was expected"),
        (body(tensor([1, None])), "input 'x': data holds null"),
        (body(tensor([1, 2.0], "INT8")), "input 'x': data holds a number; whole numbers was expected"),
        (body(tensor([1, 128], "INT8")), "input 'x': an element does not fit INT8"),
        (body(tensor([1, -1], "UINT64")), "input 'x': an element does not fit UINT64"),
        (body(tensor([1, 1e39])), "input 'x': an element does not fit FP32"),
        (body(tensor([1, 10**400])), "input 'x': an element does not fit FP32"),
        (body(tensor([True, 1], "BOOL")), "input 'x': data holds a number; true or false was expected"),
        (body(tensor(["a", "\ud800"], "BYTES")), "input 'x': an element cannot be encoded as UTF-8"),
        (body(tensor([1, 2], "FP31")), "input 'x': datatype 'FP31' is unknown"),
        (body(tensor(3)), "input 'x': data is a number; an array"),
        (body({"name": "x", "datatype": "FP32", "shape": [1]}), "input 'x': it has no data"),
        (body(tensor([1, 2]), tensor([1, 2])), "input 'x' is present twice"),
        (body(tensor([1, 2], parameters={"binary_data_size": 8})), "input 'x': got both data and binary_data_size"),
        (body(tensor([1, 2]), parameters={"timeout": 10**400}), "parameter 'timeout' is 1000"),
        (body(tensor([1, 2]), parameters=[]), "parameters are"),
        (body(tensor([1, 2]), id=7), "id is 7; text"),
    ],
)
async def test_what_is_malformed_is_400_with_a_sentence(
    client: httpx.AsyncClient, request_: Any, sentence: str
) -> None:
    content = request_ if isinstance(request_, str) else json.dumps(request_)
    answer = await client.post(INFER, content=content)
    assert answer.status_code == 400
    assert re.search(sentence, answer.json()["error"])


@pytest.mark.parametrize(
    ("length", "sizes", "sentence"),
    [
        ("x", [4], "Inference-Header-Content-Length is 'x'"),
        ("9999", [4], "Inference-Header-Content-Length is 9999"),
        (None, [4], "binary_data_size is 4, but 0 bytes of binary data are left"),
        ("right", [-1], "binary_data_size is -1"),
        ("right", [3], "needs 4 bytes of content, but got 3"),
        ("right", ["4"], "binary_data_size is '4'; a whole number"),
        ("right", [], "4 bytes of binary data belong to no input"),
    ],
)
async def test_binary_data_that_does_not_add_up_is_400(
    client: httpx.AsyncClient, length: str | None, sizes: list[Any], sentence: str
) -> None:
    inputs = [{"name": "x", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": n}} for n in sizes]
    header = json.dumps({"inputs": inputs}).encode()
    value = str(len(header)) if length == "right" else length
    headers = {} if value is None else {"Inference-Header-Content-Length": value}
    content = header if length is None else header + b"1234"
    answer = await client.post(INFER, content=content, headers=headers)
    assert answer.status_code == 400
    assert sentence in answer.json()["error"]


@pytest.mark.parametrize(
    ("content", "coding", "status"),
    [
        (b"x" * (MAX_BYTES + 1), "identity", 413),
        (zlib.compress(b"x" * 1_000_000), "deflate", 413),
        (zlib.compress(b"{}")[:-3], "deflate", 400),
        (b"no gzip", "gzip", 400),
        (b"{}", "br", 501),
    ],
)
async def test_a_body_is_taken_no_larger_than_it_may_be(
    client: httpx.AsyncClient, content: bytes, coding: str, status: int
) -> None:
    answer = await client.post(INFER, content=content, headers={"content-encoding": coding})
    assert answer.status_code == status
    assert answer.json()["error"]


@pytest.mark.parametrize(
    ("error", "status"),
    [(NotReadyError("not yet"), 503), (OverloadedError("full"), 429), (ZeroDivisionError("x"), 500)],
)
async def test_failures_have_the_status_that_fits(
    client: httpx.AsyncClient, evaluator: ScriptedEvaluator, error: Exception, status: int
) -> None:
    evaluator.refusals = [error]
    answer = await client.post(INFER, json=body(tensor([1, 2])))
    assert answer.status_code == status
    assert answer.headers.get("retry-after") == ("1" if status == 429 else None)
    assert ("internal error" in answer.json()["error"]) == (status == 500)


async def test_another_model_is_404_whatever_the_body(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v2/models/other/infer", content=b"{")
    assert answer.status_code == 404
    assert answer.json() == {"error": "there is no model 'other'; this server serves 'model'"}


async def test_text_that_is_none_must_be_asked_for_as_binary_data(ask: Ask) -> None:
    answer = await ask({"y": np.array([[b"\xff"]], dtype=object)}, json=body(tensor([1, 2])))
    assert answer.status_code == 400
    assert "output 'y' has bytes that are not UTF-8 text" in answer.json()["error"]


async def test_while_draining_it_takes_no_new_work(client: httpx.AsyncClient, readiness: Readiness) -> None:
    readiness.become_ready()
    assert (await client.get("/v2/health/ready")).status_code == 200
    readiness.start_draining()
    assert (await client.get("/v2/health/ready")).status_code == 400
    assert (await client.get("/v2/health/live")).status_code == 200
    assert (await client.post(INFER, json=body(tensor([1, 2])))).status_code == 503


async def test_every_answer_has_the_caller_s_request_id(client: httpx.AsyncClient) -> None:
    answer = await client.get("/v2", headers={"x-request-id": "mine"})
    assert answer.headers["x-request-id"] == "mine"


async def test_inputs_that_do_not_fit_are_refused_before_they_are_built(
    client: httpx.AsyncClient, evaluator: ScriptedEvaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Any] = []
    monkeypatch.setattr("understudy.service.rest.infer_json.decode_data", lambda *came, **_: built.append(came))
    evaluator.form_refusals.append(InvalidInputError("input 'x' has shape [1, 2]; [examples, 7] was expected"))

    answer = await client.post("/v2/models/model/versions/3/infer", json=body(tensor([1, 2])))

    assert (answer.status_code, answer.json()) == (
        400,
        {"error": "input 'x' has shape [1, 2]; [examples, 7] was expected"},
    )
    assert evaluator.forms == {"forms": {"x": ("float32", (1, 2))}, "version": 3}
    assert built == []


async def test_no_more_elements_are_built_than_the_shape_has(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = 0

    def flattened(data: Any) -> Iterator[Any]:
        nonlocal drawn
        for element in data:
            drawn += 1
            yield element

    monkeypatch.setattr(elements, "_flattened", flattened)
    with pytest.raises(WireError, match="needs 2 elements in data, but got more"):
        elements.decode_data([0] * 10_000, "FP32", [1, 2], name="x")
    assert drawn == 3


@pytest.mark.parametrize(
    ("request_", "what"),
    [
        (body({"name": "x" * 100_000}), "input 0: name"),
        (body(tensor([1, 2], "F" * 100_000)), "input 'x': datatype"),
        (body(tensor([1, 2]), outputs=[{"name": "y" * 100_000}]), "output 0: name"),
        (body(tensor([1, 2]), id="i" * 100_000), "the request: id"),
    ],
)
def test_a_text_of_megabytes_is_refused_without_being_quoted(request_: Any, what: str) -> None:
    content = json.dumps(request_).encode()
    with pytest.raises(InvalidInputError, match=f"{what} has 100000 characters; 65536 is the limit"):
        parse_infer(content, None, model_name="m", model_version="", check_forms=lambda *_: None)


def test_large_json_is_what_small_json_is() -> None:
    value = {"a": [1, -2.5e3, "\u00fc\ud83d\ude00", None, True, {}], "pad": ["x" * 100] * 400, "nan": 1e400}
    text = json.dumps(value).replace("Infinity", "1e999")
    assert len(text) > MAX_BYTES_AT_ONCE
    assert read_json(text.encode()) == json.loads(text)
    for broken in (text[:-1], text + "]", text.replace("null", "nul"), text.replace("[1,", "[" + "9" * 5000 + ",")):
        with pytest.raises(InvalidInputError, match="not JSON"):
            read_json(broken.encode())
    with pytest.raises(InvalidInputError, match="not JSON"):
        read_json(b"[" * 50_000)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
)


@given(JSON_VALUES, st.sampled_from([None, 0, 2]), st.integers(0, 400), st.text('[]{},":\\ 1eNnu', max_size=2))
def test_json_in_pieces_is_accepted_and_refused_as_json_at_once(
    value: Any, indent: int | None, at: int, inserted: str
) -> None:
    text = json.dumps([value, value], indent=indent)
    text = text[:at] + inserted + text[at:]
    try:
        expected = repr(json.loads(text))
    except ValueError as error:
        expected = str(error)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elements, "MAX_BYTES_AT_ONCE", -1)
        try:
            found = repr(read_json(text.encode()))
        except InvalidInputError as error:
            found = str(error).removeprefix("the body is not JSON: ")
    assert found == expected


def test_the_members_of_large_json_are_bounded() -> None:
    members = ",".join(f'"{number}": 0' for number in range(70_000))
    with pytest.raises(InvalidInputError, match="more than 16384 members"):
        read_json(f"{{{members}}}".encode())


@pytest.mark.parametrize("content", [b'{"a": [' + b"[]," * 70_000 + b"[]]}", b"[" * 70_000])
def test_the_containers_of_large_json_are_bounded(content: bytes) -> None:
    with pytest.raises(InvalidInputError, match="more than 65536 arrays and objects"):
        read_json(content)


def test_long_arrays_are_let_go_in_pieces() -> None:
    inner = [1] * 100_000
    let_go({"a": [inner, {"b": inner}], "c": "text"})
    assert len(inner) <= 8192


@pytest.mark.parametrize("compressed", [False, True])
async def test_the_event_loop_turns_while_a_large_body_is_parsed(
    evaluator: ScriptedEvaluator, large_client: httpx.AsyncClient, *, compressed: bool
) -> None:
    content = json.dumps(body(tensor([0] * 200_000, shape=(1, 200_000)))).encode()
    headers = {"content-encoding": "gzip"} if compressed else {}
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += not evaluator.forms and threading.active_count() > 1

    turning = asyncio.create_task(turn())
    asking = asyncio.create_task(
        large_client.post(INFER, content=gzip.compress(content) if compressed else content, headers=headers)
    )
    (await evaluator.predictions.get()).set_result(prediction(1))
    assert (await asking).status_code == 200
    turning.cancel()
    assert turns > 10
    assert evaluator.asked["inputs"]["x"].shape == (1, 200_000)


@pytest.mark.parametrize("limit", ["IDLE_SECONDS", "TOTAL_SECONDS"])
async def test_a_body_that_does_not_come_to_an_end_is_not_waited_for(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(f"understudy.service.rest.rest_call.{limit}", 0.1)

    async def pieces() -> AsyncIterator[bytes]:
        yield b"{"
        while limit == "TOTAL_SECONDS":
            yield b""
            await asyncio.sleep(0.01)
        await asyncio.Event().wait()

    answer = await client.post(INFER, content=pieces())

    assert answer.status_code == 408
    assert answer.headers["connection"] == "close"
    assert "unfinished after 1 bytes" in answer.json()["error"]
