"""The model under KServe's gRPC server.

python kserve_server.py MODEL_NAME MODEL_FILE GRPC_PORT
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc
from forward import Forward
from kserve import InferOutput, InferRequest, InferResponse, Model
from kserve.model_repository import ModelRepository
from kserve.protocol.dataplane import DataPlane
from kserve.protocol.grpc.server import GRPCServer
from kserve.protocol.model_repository_extension import ModelRepositoryExtension

THREADS = 4


class Net(Model):
    """KServe's model interface."""

    def __init__(self, name: str, forward: Forward) -> None:
        super().__init__(name)
        self._forward = forward
        self.ready = True

    async def predict(self, payload: InferRequest, *_: Any, **__: Any) -> InferResponse:
        """Answer one request."""
        answers = self._forward(payload.inputs[0].as_numpy())
        output = InferOutput(name="y", shape=list(answers.shape), datatype="FP32")
        output.set_data_from_numpy(answers, binary_data=True)
        return InferResponse(response_id=payload.id, model_name=self.name, infer_outputs=[output])


def listen_here_only() -> None:
    """Make gRPC servers of this process listen on the loopback address instead of on all addresses."""
    add_port = grpc.aio.Server.add_insecure_port

    def add_local_port(server: grpc.aio.Server, address: str) -> int:
        return add_port(server, address.replace("[::]", "127.0.0.1"))

    setattr(grpc.aio.Server, "add_insecure_port", add_local_port)  # noqa: B010 - no type checker allows it otherwise


def main(name: str, model_file: str, port: int) -> None:
    """Serve until the process is ended."""
    listen_here_only()
    models = ModelRepository()
    models.update(Net(name, Forward(model_file)))
    plane = DataPlane(models)
    options = {"grpc_max_send_message_length": 2**28, "grpc_max_receive_message_length": 2**28}
    server = GRPCServer(port, plane, ModelRepositoryExtension(models), kwargs=options)
    asyncio.run(server.start(THREADS))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
