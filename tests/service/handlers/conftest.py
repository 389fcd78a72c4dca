"""What the handlers are tested with."""

from __future__ import annotations

import pytest

from testkit.scripted_evaluator import ScriptedEvaluator


@pytest.fixture
async def evaluator() -> ScriptedEvaluator:
    return ScriptedEvaluator()
