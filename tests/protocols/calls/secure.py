"""Calls servers over TLS with another project's client, and prints the outcomes. Runs in that client's environment.

secure.py triton|tfserving SITES    (a JSON file with a list of `testkit.secure_sites.Site`, as dictionaries)
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

CLIENT, SITES = sys.argv[1:]
SECONDS = 30
EXAMPLES = [[1.0, 2.0, 3.0, 4.0], [0.5, 0.5, 0.5, 0.5]]

Outcome = list[float] | bool | str
Site = dict[str, Any]


def first(rows: Any) -> list[float]:
    """Return the first output of each example."""
    return [float(row[0]) for row in rows]


def outcome(call: Callable[[], Any], *errors: type[Exception]) -> Outcome:
    """Return the result of a call, or the text of its error."""
    try:
        return call()  # type: ignore[no-any-return]
    except errors as error:
        return f"{type(error).__name__}: {error}"


def triton(site: Site) -> dict[str, Outcome]:
    import numpy as np
    import tritonclient.grpc as triton_grpc
    import tritonclient.grpc.aio as triton_grpc_aio
    import tritonclient.http as triton_http
    import tritonclient.http.aio as triton_http_aio
    from tritonclient.utils import InferenceServerException

    headers = {"authorization": f"Bearer {site['token']}"}
    over_grpc = {
        "ssl": True,
        "root_certificates": site["ca"],
        "private_key": site["key"],
        "certificate_chain": site["certificate"],
    }

    def inputs(module: Any) -> list[Any]:
        x = module.InferInput("x", [2, 4], "FP32")
        x.set_data_from_numpy(np.array(EXAMPLES, np.float32))
        return [x]

    def infer(client: Any, module: Any, **how: Any) -> list[float]:
        return first(client.infer("model", inputs(module), **how).as_numpy("y"))

    async def infer_asynchronously(client: Any, module: Any, **how: Any) -> list[float]:
        async with client:
            return first((await client.infer("model", inputs(module), **how)).as_numpy("y"))

    with triton_grpc.InferenceServerClient(site["grpc"], **over_grpc) as client:
        found = {
            "grpc ready": client.is_server_ready(),
            "grpc": infer(client, triton_grpc, headers=headers),
            "grpc without a token": outcome(lambda: infer(client, triton_grpc), InferenceServerException),
        }
    with triton_http.InferenceServerClient(
        site["http"], ssl=True, ssl_context_factory=lambda: _context(site)
    ) as client:
        found |= {
            "http ready": client.is_server_ready(),
            "http": infer(client, triton_http, headers=headers),
            "http without a token": outcome(lambda: infer(client, triton_http), InferenceServerException),
        }

    async def ask() -> None:
        # Its argument `headers` fails with grpcio 1.85: it hands a view of a dictionary to grpc.aio.
        client = triton_grpc_aio.InferenceServerClient(site["grpc"], creds=_credentials(site))
        found["grpc.aio"] = await infer_asynchronously(client, triton_grpc)
        client = triton_http_aio.InferenceServerClient(site["http"], ssl=True, ssl_context=_context(site))
        found["http.aio"] = await infer_asynchronously(client, triton_http, headers=headers)

    asyncio.run(ask())
    return found


def _context(site: Site) -> Any:
    import ssl

    context = ssl.create_default_context(cafile=site["ca"])
    if site["certificate"]:
        context.load_cert_chain(site["certificate"], site["key"])
    return context


def _credentials(site: Site, *, has_token: bool = True) -> Any:
    import grpc

    files = (site["ca"], site["key"], site["certificate"])
    channel = grpc.ssl_channel_credentials(*(file and Path(file).read_bytes() for file in files))
    if not has_token:
        return channel
    return grpc.composite_channel_credentials(channel, grpc.access_token_call_credentials(site["token"]))


def tfserving(site: Site) -> dict[str, Outcome]:
    import grpc
    import numpy as np
    import tensorflow as tf
    from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc

    request = predict_pb2.PredictRequest(inputs={"x": tf.make_tensor_proto(np.array(EXAMPLES, np.float32))})
    request.model_spec.name = "model"

    def predict(credentials: grpc.ChannelCredentials) -> list[float]:
        with grpc.secure_channel(site["grpc"], credentials) as channel:
            stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
            return first(tf.make_ndarray(stub.Predict(request, timeout=SECONDS).outputs["y"]))

    return {
        "grpc": predict(_credentials(site)),
        "grpc without a token": outcome(lambda: predict(_credentials(site, has_token=False)), grpc.RpcError),
    }


def main() -> None:
    call = {"triton": triton, "tfserving": tfserving}[CLIENT]
    print(json.dumps({site["name"]: call(site) for site in json.loads(Path(SITES).read_text())}))


main()
