from __future__ import annotations

from collections.abc import Iterator

import pytest

from testkit.webhook_receiver import Receiver, receiving


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver
