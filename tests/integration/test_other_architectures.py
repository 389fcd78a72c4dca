"""What happens to requests when a trainer is started again with another model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from testkit.checkpoints import OUTPUTS, WIDTH, Chief, ones, step_model
from testkit.in_process import RunningService, until
from understudy.clients import AsyncClient, Client, FailedPreconditionError, InvalidArgumentError, UnderstudyError

pytestmark = pytest.mark.long

ALTERNATIONS = 4
WIDER = WIDTH + 1
WIDE_STEP = ALTERNATIONS + 2

HELD_BACK = {"max_batch_size": 8, "max_batch_delay_ms": 5_000.0}
"""A batch waits for more examples, so that the model can be changed meanwhile."""

Run = Callable[..., RunningService]


def wide_ones(rows: int) -> Any:
    return np.ones((rows, WIDER), np.float32)


async def test_requests_that_fit_every_model_never_fail_and_the_others_hear_what_the_new_one_takes(
    run_service: Run, chief: Chief
) -> None:
    chief.publish(1)
    service = run_service()
    service.wait_ready()
    client = service.client()
    publishing = threading.Thread(target=alternate, args=(chief, client))
    async with AsyncClient(service.grpc) as predicting:
        publishing.start()
        try:
            steps, refusal = await predict_until_refused(predicting)
        finally:
            publishing.join()

        assert set(range(1, WIDE_STEP)) >= steps >= {WIDE_STEP - 1}
        assert len(steps) > ALTERNATIONS // 2
        assert isinstance(refusal, InvalidArgumentError | FailedPreconditionError)
        assert f"[1, {WIDTH}]; [examples, {WIDER}] was expected" in str(refusal)
        answer = await predicting.predict({"x": wide_ones(2)})
    assert answer.step == WIDE_STEP
    np.testing.assert_array_equal(answer.outputs["y"], np.full((2, OUTPUTS), WIDE_STEP, np.float32))
    (spec,) = client.metadata().inputs
    assert spec.shape == (None, WIDER)


def alternate(chief: Chief, client: Client) -> None:
    """Publish models of two architectures in turn, and one that takes something else at last."""
    for step in range(2, WIDE_STEP + 1):
        if step == WIDE_STEP:
            chief.publish_other(step, step_model(step, width=WIDER))
        elif step % 2 == 0:
            chief.publish_other(step, step_model(step, deeper=True))
        else:
            chief.publish(step)
        until(lambda step=step: client.status().serving_step == step)  # type: ignore[misc]


async def predict_until_refused(client: AsyncClient) -> tuple[set[int], UnderstudyError]:
    """Predict one after another; return the steps that answered, and the first failure."""
    steps: set[int] = set()
    while True:
        try:
            result = await client.predict({"x": ones(1)})
        except UnderstudyError as error:
            return steps, error
        assert np.array_equal(result.outputs["y"], np.full((1, OUTPUTS), result.step, np.float32))
        steps.add(result.step)


async def test_a_request_that_waited_while_the_model_changed_is_told_from_what_to_what(
    run_service: Run, chief: Chief
) -> None:
    chief.publish(1)
    chief.publish_other(2, step_model(2, width=WIDER))
    service = run_service(evaluator=HELD_BACK)
    service.wait_ready()
    client = service.client()
    client.promote(2)
    client.promote(1)
    async with AsyncClient(service.grpc) as predicting:
        waiting = asyncio.create_task(predicting.predict({"x": ones(1)}))
        await asyncio.to_thread(until, lambda: service.metric("understudy_queue_examples") == 1)
        await predicting.promote(2)
        with pytest.raises(FailedPreconditionError, match=r"from step 1 to step 2 .* 'x' float32 \[examples, 5\]"):
            await waiting
