from __future__ import annotations

from collections.abc import Iterator

import pytest

from testkit.engine_harness import EngineHarness


@pytest.fixture
def harness() -> Iterator[EngineHarness]:
    built = EngineHarness(max_batch_size=8, max_queue_examples=16)
    yield built
    built.close()
