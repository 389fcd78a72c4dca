from __future__ import annotations

import subprocess
import sys

import understudy.evaluator


def test_importing_the_evaluator_loads_no_tensorflow() -> None:
    program = "import sys, understudy.evaluator; sys.exit('tensorflow' in sys.modules or 'keras' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


def test_the_public_surface_is_what_it_says() -> None:
    assert all(hasattr(understudy.evaluator, name) for name in understudy.evaluator.__all__)
