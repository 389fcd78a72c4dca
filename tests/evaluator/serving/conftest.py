"""A manager of servables whose loading tests control."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit.text_lifecycle import WAIT_SECONDS, TextLifecycle


@pytest.fixture
def lifecycle(tmp_path: Path) -> Iterator[TextLifecycle]:
    lifecycle = TextLifecycle(tmp_path)
    lifecycle.manager.start()
    yield lifecycle
    lifecycle.may_load.set()
    lifecycle.manager.close(WAIT_SECONDS)
