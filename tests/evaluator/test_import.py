from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

import understudy.evaluator


@pytest.mark.parametrize(
    "module",
    [
        "understudy.evaluator",
        pytest.param(
            "understudy.evaluator.sharding.cluster_process",
            marks=pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="without the extra [ray]"),
        ),
    ],
)
def test_importing_the_evaluator_and_connecting_to_a_cluster_load_no_tensorflow(module: str) -> None:
    program = f"import sys, {module}; sys.exit('tensorflow' in sys.modules or 'keras' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=200).returncode == 0


def test_the_public_surface_is_what_it_says() -> None:
    assert all(hasattr(understudy.evaluator, name) for name in understudy.evaluator.__all__)
