"""Whether these tests run on GPUs."""

from __future__ import annotations

import os

ON_GPUS = "UNDERSTUDY_TEST_GPUS" in os.environ
"""Set by ``make test-gpu``."""
