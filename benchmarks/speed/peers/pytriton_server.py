"""The model under pytriton.

python pytriton_server.py MODEL_NAME MODEL_FILE GRPC_PORT HTTP_PORT METRICS_PORT
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from forward import Forward
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

LARGEST_BATCH = 256
HOST = "127.0.0.1"


def main(name: str, model_file: str, grpc_port: int, http_port: int, metrics_port: int) -> None:
    """Serve until the process is ended."""
    forward = Forward(model_file)

    @batch
    def infer(x: Any) -> dict[str, Any]:
        return {"y": forward(x)}

    config = TritonConfig(
        grpc_address=HOST,
        grpc_port=grpc_port,
        http_address=HOST,
        http_port=http_port,
        metrics_address=HOST,
        metrics_port=metrics_port,
    )
    with Triton(config=config) as server:
        server.bind(
            model_name=name,
            infer_func=infer,
            inputs=[Tensor(name="x", dtype=np.float32, shape=forward.row_shape)],
            outputs=[Tensor(name="y", dtype=np.float32, shape=(10,))],
            config=ModelConfig(max_batch_size=LARGEST_BATCH, batcher=DynamicBatcher()),
        )
        server.serve()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6]))
