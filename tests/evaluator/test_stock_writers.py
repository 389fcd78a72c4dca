"""Stock writers at full speed beside an evaluator: a sample of ``python -m soak stock_writers``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from testkit.preloading import preloaded

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
SECONDS = 1


@pytest.mark.timeout(600)
def test_no_save_fails_and_no_read_is_torn_in_any_format(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "soak", "stock_writers", "--count", str(SECONDS)]
    folders = ["--work", str(tmp_path / "work"), "--results", str(tmp_path)]
    environment = {**os.environ, **preloaded(), "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}

    done = subprocess.run(
        [*command, *folders], cwd=ROOT, env=environment, timeout=500, capture_output=True, check=False
    )

    assert done.returncode == 0, done.stderr.decode()
    formats = json.loads((tmp_path / "soak_stock_writers.json").read_text())["formats"]
    assert set(formats) == {
        "keras",
        "weights_h5",
        "h5",
        "checkpoint_manager",
        "saved_model_numbered",
        "saved_model_overwritten",
    }
    assert all(tried["saves"] > 0 and tried["last_served"] for tried in formats.values())
