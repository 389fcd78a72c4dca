"""Devices that fail take readiness back; if they go on failing, they end the service."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from testkit.checkpoints import WIDTH, Chief, ones
from testkit.in_process import WAIT_SECONDS
from understudy.clients import AsyncClient, InternalError
from understudy.evaluator.evaluation.training_end import ExitReason, ServiceExit
from understudy.evaluator.settings import EvaluatorSettings
from understudy.service.grpcio.grpc_server import server_of
from understudy.service.server import Service
from understudy.service.settings import ServeSettings

pytestmark = pytest.mark.long

LIMIT = 8
"""The service tries the devices each second while they fail, and as many failures again end it; so it has 8 seconds."""
POISON = -99.0

broken = threading.Event()


@keras.saving.register_keras_serializable("tests")
class Fragile(keras.layers.Layer):  # type: ignore[misc] # keras has no types
    """Passes its input on; while it is `broken`, its operation fails in TensorFlow's runtime."""

    def call(self, inputs: Any) -> Any:
        outputs = tf.numpy_function(self._run, [inputs], tf.float32)
        outputs.set_shape(inputs.shape)
        return outputs

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape

    @staticmethod
    def _run(values: Any) -> Any:
        if broken.is_set():
            raise RuntimeError("an illegal memory access was encountered")
        if np.any(values == POISON):
            raise RuntimeError("the model's own code fails on this value")
        return values


class FragileChief(Chief):
    def __init__(self, run: Path) -> None:
        super().__init__(run)
        x = keras.Input((WIDTH,), name="x")
        self._model = keras.Model(x, keras.layers.Dense(8, use_bias=False, name="y")(Fragile()(x)))
        self._model.compile(loss="mse")


class RunningTask:
    def __init__(self, run: Path, replicas: tuple[str, ...]) -> None:
        self.lines: asyncio.Queue[str] = asyncio.Queue()
        self.stop = asyncio.Event()
        self.address_file = run.with_name("address")
        state_dir = run / "evaluator"
        settings = ServeSettings(run_dir=run, grpc_port=0, http_port=0, address_file=self.address_file)
        service = Service(
            settings,
            EvaluatorSettings(state_dir=state_dir, devices=replicas, max_device_failures=LIMIT),
            announce=self._announce,
            make_front_end=partial(server_of, settings),
        )
        self.ended: asyncio.Task[ServiceExit] = asyncio.create_task(service.run(self.stop))

    def _announce(self, line: str) -> None:
        self.lines.put_nowait(line)

    async def ready(self) -> str:
        """Return the address for gRPC when the first checkpoint is served."""
        while not (line := await asyncio.wait_for(self.lines.get(), WAIT_SECONDS)).startswith("READY"):
            pass
        assert line.startswith(f"READY {self.address_file.read_text(encoding='ascii').strip()} ")
        return line.split()[1].removeprefix("grpc=")


async def until_serving(client: AsyncClient, *, serving: bool) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while await client.is_serving() is not serving:  # noqa: ASYNC110 - it is the other side of a wire
            await asyncio.sleep(0.1)


async def test_devices_that_fail_take_readiness_back_and_then_end_the_service(
    tmp_path: Path, replicas: tuple[str, ...]
) -> None:
    broken.clear()
    FragileChief(tmp_path / "run").publish(7)
    service = RunningTask(tmp_path / "run", replicas)
    async with AsyncClient(await service.ready()) as client:
        assert (await client.predict({"x": ones(3)})).step == 7

        broken.set()
        for _ in range(LIMIT):
            with pytest.raises(InternalError):
                await client.predict({"x": ones(3)})
        await until_serving(client, serving=False)

        broken.clear()  # a trial of the service's own finds out, though no request comes
        await until_serving(client, serving=True)
        assert (await client.predict({"x": ones(3)})).step == 7

        broken.set()
        for _ in range(LIMIT):
            with pytest.raises(InternalError):
                await client.predict({"x": ones(3)})
        service_exit = await asyncio.wait_for(service.ended, WAIT_SECONDS)

    assert not service.address_file.exists()
    assert service_exit.reason is ExitReason.DEVICE_FAILED
    assert service_exit.message.startswith(
        f"the devices failed {2 * LIMIT} times in a row: UnknownError: RuntimeError: "
    )
    broken.clear()


async def test_values_that_make_a_model_raise_neither_take_readiness_back_nor_end_the_service(
    tmp_path: Path, replicas: tuple[str, ...]
) -> None:
    broken.clear()
    FragileChief(tmp_path / "run").publish(7)
    service = RunningTask(tmp_path / "run", replicas)
    poison = np.full((3, WIDTH), POISON, np.float32)
    async with AsyncClient(await service.ready()) as client:
        for _ in range(LIMIT + 1):
            with pytest.raises(InternalError):
                await client.predict({"x": poison})
            with pytest.raises(InternalError):
                await client.evaluate([(poison, np.ones((3, 8), np.float32))])
            assert await client.is_serving()
        assert (await client.predict({"x": ones(3)})).step == 7

    service.stop.set()
    assert (await asyncio.wait_for(service.ended, WAIT_SECONDS)).reason is not ExitReason.DEVICE_FAILED
