"""The fast path of predictions is one, and nothing else: without it, every call has the same outcome."""

from __future__ import annotations

import numpy as np
import pytest
from protocols.conftest import Fetch, Serve, triton_report

from testkit.fetched import INSTALL_SECONDS
from testkit.front_ends import GRPCIO
from testkit.values import WIDTH
from understudy.clients import Client, PredictResult

pytestmark = [pytest.mark.long, pytest.mark.timeout(INSTALL_SECONDS + 60)]

PLAIN = "plain-codecs"
"""The front end of `testkit.plugins`."""


def test_triton_s_client_gets_the_same_without_the_fast_path(serve: Serve, fetch: Fetch) -> None:
    plain, fast = (triton_report("grpc", serve(front_end), fetch) for front_end in (PLAIN, GRPCIO))
    timeless = [name for name in fast if not name.startswith("statistics")]

    assert plain.keys() == fast.keys()
    assert {name: plain[name] for name in timeless} == {name: fast[name] for name in timeless}
    assert len(timeless) > 50


def test_our_client_gets_the_same_without_the_fast_path(serve: Serve) -> None:
    batches = [np.full((2, WIDTH), value, np.float32) for value in range(5)]
    answers = []
    for front_end in (PLAIN, GRPCIO):
        with Client(serve(front_end).plain.grpc) as client:
            unary = [client.predict(batch) for batch in batches]
            streamed = [outcome for outcome in client.predict_many(batches) if isinstance(outcome, PredictResult)]
        answers.append([(result.step, result.output.tolist()) for result in (*unary, *streamed)])

    assert len(answers[0]) == 2 * len(batches)
    assert answers[0] == answers[1]
