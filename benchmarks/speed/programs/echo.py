"""Answers every ModelInfer with an empty message, on grpc.aio with raw bytes: the cost of the transport alone.

python -m benchmarks.speed.programs.echo PORT
"""

from __future__ import annotations

import asyncio
import sys

import grpc

SERVICE = "inference.GRPCInferenceService"


async def serve(port: int) -> None:
    """Serve until the process is ended."""
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0)])
    handler = grpc.unary_unary_rpc_method_handler(_answer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"ModelInfer": handler}),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


async def _answer(_: bytes, __: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
    return b""


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
