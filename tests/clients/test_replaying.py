"""Replays by both clients against the peer."""

from __future__ import annotations

import grpc
import numpy as np
import pytest

from testkit.peer_server import STEP, Failure, Script
from understudy.clients import AsyncClient, Client, InvalidArgumentError, NotFoundError, UnderstudyError

ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)


def test_a_version_describes_itself_and_answers_batch_after_batch(client: Client, script: Script) -> None:
    with client.replay(version=STEP) as replay:
        assert (replay.model.step, replay.model.inputs[0].name) == (STEP, "image")
        for inputs in (ROWS, {"image": ROWS}, ROWS.tolist()):
            np.testing.assert_array_equal(replay.predict(inputs).output, 2 * ROWS)
    assert script.calls == {"Replay": 1}
    assert script.requests[0].options.version.step == STEP


async def test_it_does_so_in_asyncio(async_client: AsyncClient, script: Script) -> None:
    async with async_client.replay(version="latest") as replay:
        assert replay.model.outputs[0].name == "doubled"
        for index in range(3):
            result = await replay.predict(ROWS + index)
            np.testing.assert_array_equal(result.output, 2 * ROWS + 2 * index)
            assert result.step == STEP
    assert script.calls == {"Replay": 1}


async def test_a_refused_replay_says_why(client: Client, async_client: AsyncClient, script: Script) -> None:
    refusal = Failure(code=grpc.StatusCode.NOT_FOUND, message="no such step")
    script.failures.append(refusal)
    with pytest.raises(NotFoundError, match="no such step"), client.replay(version=7):
        pass
    script.failures.append(refusal)
    with pytest.raises(NotFoundError, match="no such step"):
        async with async_client.replay(version=7):
            pass


def test_what_cannot_be_sent_ends_nothing(client: Client) -> None:
    with client.replay() as replay:
        with pytest.raises(InvalidArgumentError, match="complex128"):
            replay.predict(ROWS.astype(complex))
        np.testing.assert_array_equal(replay.predict(ROWS).output, 2 * ROWS)


def test_a_replay_that_is_over_says_so(client: Client) -> None:
    with client.replay() as replay:
        pass
    with pytest.raises(UnderstudyError, match="the server ended the stream"):
        replay.predict(ROWS)
