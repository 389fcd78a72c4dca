"""The whole service on all GPUs, over gRPC."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import keras
import numpy as np
import pytest

from understudy.clients import Client

pytestmark = pytest.mark.gpu

START_SECONDS = 600.0
"""A GPU that is newer than TensorFlow's kernels compiles them first."""


@pytest.mark.timeout(START_SECONDS + 60)
def test_the_service_answers_from_all_gpus(devices: tuple[str, ...], tmp_path: Path) -> None:
    x = keras.Input((16,), name="x")
    model = keras.Model(x, keras.layers.Dense(4, name="y")(x))
    model.save(tmp_path / "model-1.keras")
    command = [sys.executable, "-m", "understudy.cli", "serve", "--checkpoints", str(tmp_path), "--devices", "GPU"]
    options = ["--state-dir", str(tmp_path / "state"), "--grpc-port", "0", "--http-port", "0"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as process:
        watchdog = threading.Timer(START_SECONDS, process.kill)
        watchdog.start()
        try:
            assert process.stdout is not None
            ready = next(line for line in process.stdout if line.startswith("READY"))
            rows = np.random.default_rng(2).normal(size=(101, 16)).astype(np.float32)
            with Client(ready.split()[1].removeprefix("grpc=")) as client:
                metadata = client.metadata()
                answer = client.predict({"x": rows})
        finally:
            watchdog.cancel()
            process.terminate()

    assert metadata.devices == tuple(f"GPU:{index}" for index in range(len(devices)))
    np.testing.assert_allclose(answer.output, model(rows).numpy(), rtol=1e-4, atol=1e-5)
