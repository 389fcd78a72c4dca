"""Makes every call of tritonclient, and prints the outcomes. Runs in tritonclient's environment.

triton.py grpc|http HOST:PORT HOST:PORT    (the server of the model "every", and that of "plain")
"""

from __future__ import annotations

import asyncio
import importlib
import json
import queue
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from tritonclient.utils import InferenceServerException

from testkit.values import DTYPES, EVERY, HALVES, PLAIN, PLAIN_STEPS, packed, values

PROTOCOL, EVERY_TARGET, PLAIN_TARGET = sys.argv[1:]
OVER_GRPC = PROTOCOL == "grpc"
triton: Any = importlib.import_module(f"tritonclient.{PROTOCOL}")
triton_aio: Any = importlib.import_module(f"tritonclient.{PROTOCOL}.aio")
AS_JSON = {"as_json": True} if OVER_GRPC else {}

WAIT_SECONDS = 30
REPORT: dict[str, Any] = {}


def note(name: str, call: Callable[[], Any]) -> None:
    """Make a call and record its result or error."""
    try:
        REPORT[name] = {"value": call()}
    except InferenceServerException as error:
        REPORT[name] = {"status": error.status(), "message": error.message()}


def tensor(name: str, dtype: str, array: Any, *, binary: bool = True) -> Any:
    made = triton.InferInput(name, list(array.shape), DTYPES[dtype])
    if OVER_GRPC:
        made.set_data_from_numpy(array)
    else:
        made.set_data_from_numpy(array, binary_data=binary)
    return made


def output(name: str, *, binary: bool = True, **more: Any) -> Any:
    return triton.InferRequestedOutput(name, **more) if OVER_GRPC else triton.InferRequestedOutput(name, binary, **more)


def every_input(*, as_json: bool = False) -> list[Any]:
    return [
        tensor(f"in_{dtype}", dtype, values(dtype), binary=not as_json or dtype in HALVES or dtype == "string")
        for dtype in DTYPES
    ]


def every_output(result: Any) -> dict[str, list[str]]:
    return {dtype: packed(result.as_numpy(f"out_{dtype}")) for dtype in DTYPES}


def response(result: Any) -> Any:
    return result.get_response(**AS_JSON)


def plain(rows: int = 2, value: float = 1.0, name: str = "x", dtype: str = "float32", width: int = 3) -> list[Any]:
    return [tensor(name, dtype, np.full((rows, width), value, dtype))]


def tell_of_the_server(client: Any) -> None:
    note("live", client.is_server_live)
    note("ready", client.is_server_ready)
    note("model ready", partial(client.is_model_ready, PLAIN))
    for version in ("1", "best", "99"):
        note(f"model ready {version}", partial(client.is_model_ready, PLAIN, version))
    note("server metadata", partial(client.get_server_metadata, **AS_JSON))
    note("metadata", partial(client.get_model_metadata, PLAIN, str(PLAIN_STEPS[0]), **AS_JSON))
    note("config", partial(client.get_model_config, PLAIN, str(PLAIN_STEPS[0]), **AS_JSON))
    note("index", partial(client.get_model_repository_index, **AS_JSON))
    note("metadata of another", partial(client.get_model_metadata, "nobody"))
    note("metadata of no version", partial(client.get_model_metadata, PLAIN, "newest"))


def infer_every_datatype(client: Any) -> None:
    result = client.infer(EVERY, every_input(), request_id="seven")
    REPORT["every"] = every_output(result)
    REPORT["response"] = {key: response(result)[key] for key in ("model_name", "model_version", "id")}
    result = client.infer(EVERY, every_input(), outputs=[output("out_int8"), output("out_bool")])
    REPORT["wanted"] = [out["name"] for out in response(result)["outputs"]]
    if not OVER_GRPC:
        outputs = [output(f"out_{dtype}", binary=dtype in HALVES or dtype == "string") for dtype in DTYPES]
        REPORT["json"] = every_output(client.infer(EVERY, every_input(as_json=True), outputs=outputs))


def infer_compressed(client: Any) -> None:
    for algorithm in ("gzip", "deflate"):
        chosen = {"request_compression_algorithm": algorithm, "response_compression_algorithm": algorithm}
        result = client.infer(PLAIN, plain(), **({"compression_algorithm": algorithm} if OVER_GRPC else chosen))
        REPORT[algorithm] = packed(result.as_numpy("y"))


def infer_with_options(client: Any) -> None:
    def ask(**options: Any) -> Any:
        return response(client.infer(PLAIN, options.pop("inputs", None) or plain(), **options))

    for version in ("serving", "latest", "best", "3", "-1", "99"):
        note(f"version {version}", partial(ask, model_version=version))
    note("timeout and priority", partial(ask, timeout=20_000_000, priority=3))
    note("timed out", partial(ask, timeout=1))
    note("sequence", partial(ask, sequence_id=7, sequence_start=True, sequence_end=True))
    note("classification", partial(ask, outputs=[output("y", class_count=2)]))
    note("unknown output", partial(ask, outputs=[output("z")]))
    note("unknown input", partial(ask, inputs=plain(name="z")))
    note("another datatype", partial(ask, inputs=plain(dtype="int32")))
    note("another shape", partial(ask, inputs=plain(width=4)))
    note("no examples", partial(ask, inputs=plain(rows=0)))
    note("another model", lambda: client.infer("nobody", plain()))


def infer_asynchronously(client: Any) -> None:
    if OVER_GRPC:
        answers: queue.Queue[Any] = queue.Queue()
        client.async_infer(PLAIN, plain(), lambda result, error: answers.put((result, error)))
        result, error = answers.get(timeout=WAIT_SECONDS)
        assert error is None, error
    else:
        result = client.async_infer(PLAIN, plain()).get_result()
    REPORT["asynchronous"] = packed(result.as_numpy("y"))


def infer_on_a_stream(client: Any) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    for number in range(20):
        name = "z" if number == 7 else "x"
        client.async_stream_infer(
            PLAIN, plain(value=number, name=name), request_id=str(number), enable_empty_final_response=number == 3
        )
    came = []
    for _ in range(20):
        result, error = answers.get(timeout=WAIT_SECONDS)
        if error is None:
            answer = response(result)
            came.append([answer["id"], float(result.as_numpy("y")[0, 0]), answer.get("parameters", {})])
        else:
            came.append(error.message())
    client.stop_stream()
    REPORT["stream"] = came


def ask_for_what_is_not_there(client: Any) -> None:
    note("load_model", lambda: client.load_model(PLAIN))
    note("unload_model", lambda: client.unload_model(PLAIN))
    for kind in ("system", "cuda"):
        note(f"{kind} status", getattr(client, f"get_{kind}_shared_memory_status"))
        note(f"{kind} unregister", getattr(client, f"unregister_{kind}_shared_memory"))
    note("system register", lambda: client.register_system_shared_memory("name", "/key", 16))
    note("cuda register", lambda: client.register_cuda_shared_memory("name", b"aGFuZGxl", 0, 16))
    note("get trace", client.get_trace_settings)
    note("update trace", lambda: client.update_trace_settings(settings={"trace_rate": "1"}))
    note("get log", client.get_log_settings)
    note("update log", lambda: client.update_log_settings({"log_info": True}))
    shared = triton.InferInput("x", [2, 3], "FP32")
    shared.set_shared_memory("region", 24)
    note("shared memory input", lambda: client.infer(PLAIN, [shared]))
    into = output("y")
    into.set_shared_memory("region", 24)
    note("shared memory output", lambda: client.infer(PLAIN, plain(), outputs=[into]))


def count_batches(client: Any) -> None:
    """Send batches of sizes that no other call uses, above `max_batch_size`, so that no request joins them."""
    for rows in (301, 301, 303):
        client.infer(PLAIN, plain(rows=rows))
    note("statistics", lambda: client.get_inference_statistics(PLAIN, str(PLAIN_STEPS[-1]), **AS_JSON))
    note("statistics of all", partial(client.get_inference_statistics, **AS_JSON))


async def ask_from_asyncio() -> None:
    client = triton_aio.InferenceServerClient(EVERY_TARGET)
    assert await client.is_server_live()
    assert await client.is_model_ready(EVERY)
    REPORT["asyncio"] = every_output(await client.infer(EVERY, every_input()))
    await client.close()
    if OVER_GRPC:
        client = triton_aio.InferenceServerClient(PLAIN_TARGET)

        async def requests() -> Any:
            for number in range(5):
                yield {"model_name": PLAIN, "inputs": plain(value=number), "request_id": str(number)}

        came = []
        async for result, error in client.stream_infer(requests()):
            came.append(error.message() if error else float(result.as_numpy("y")[0, 0]))
        REPORT["asyncio stream"] = came
        await client.close()


def main() -> None:
    with triton.InferenceServerClient(EVERY_TARGET) as client:
        note("metadata of every", partial(client.get_model_metadata, EVERY, **AS_JSON))
        note("config of every", partial(client.get_model_config, EVERY, **AS_JSON))
        infer_every_datatype(client)
    with triton.InferenceServerClient(PLAIN_TARGET) as client:
        tell_of_the_server(client)
        infer_with_options(client)
        infer_compressed(client)
        infer_asynchronously(client)
        if OVER_GRPC:
            infer_on_a_stream(client)
        ask_for_what_is_not_there(client)
        count_batches(client)
    asyncio.run(ask_from_asyncio())
    print(json.dumps(REPORT))


main()
