"""Callers that begin many large bodies and end none, against a whole server."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil
import pytest

from testkit.front_ends import FRONT_ENDS
from testkit.hostile_connections import UnfinishedBodies
from testkit.in_process import until
from testkit.served import plain_model, publish, serving
from testkit.values import WIDTH
from understudy.clients import Client

SECONDS = 30.0
MIB = 1 << 20
BODY_MIB = 32
BODY_BYTES = 4 * MIB
CONNECTIONS, STREAMS = 4, 20
SLACK_MIB = 120
"""Envoy's and Python's own buffers; without a bound, the bodies alone take 320 MiB."""


@pytest.mark.parametrize("front_end", FRONT_ENDS[1:])
def test_unfinished_bodies_hold_bounded_memory_and_a_caller_is_answered(tmp_path: Path, front_end: str) -> None:
    publish(tmp_path, {2: plain_model(2)})
    flags = ("--max-message-mib", "16", "--max-body-mib", str(BODY_MIB), "--frontend", front_end)
    with serving(tmp_path, "plain", *flags) as served, Client(served.grpc, timeout_seconds=SECONDS) as client:
        inputs = {"x": np.ones((1, WIDTH), np.float32)}
        assert client.predict(inputs).step == 2
        process = psutil.Process(served.pid)
        before = process.memory_info().rss
        with ExitStack() as stack:
            path = "/understudy.v1.PredictionService/Predict"
            hostile = [stack.enter_context(UnfinishedBodies(served.connect(), path)) for _ in range(CONNECTIONS)]
            for each in hostile:
                for _ in range(STREAMS):
                    each.begin(BODY_BYTES)
            until(lambda: sum(each.push() for each in hostile) == 0)
            assert sum(each.refused for each in hostile) >= CONNECTIONS * STREAMS - BODY_MIB * MIB // BODY_BYTES
            assert client.predict(inputs).step == 2
            assert process.memory_info().rss - before < (BODY_MIB + SLACK_MIB) * MIB
        assert client.predict(inputs).step == 2
