"""Mirrored training over all devices gives the weights of one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from testkit.hardware import ON_GPUS
from testkit.training_harness import STEPS, Dense, run, weights_of
from understudy.trainer import gradients

OPERATIONS = "nccl" if ON_GPUS else "hierarchical_copy"
"""NCCL has no operations for CPUs."""


def test_mirrored_training_gives_the_weights_of_one_device(
    several: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "PACK_BYTES", 100)  # several packs
    chosen = several[:3]  # the batch of 24 examples is shared evenly by 2 and by 3

    run(Dense(), tmp_path / "one", devices=chosen[:1])
    run(Dense(), tmp_path / "all", strategy="mirrored", devices=chosen, cross_device_ops=OPERATIONS)

    for one, many in zip(weights_of(tmp_path / "one", STEPS), weights_of(tmp_path / "all", STEPS), strict=True):
        np.testing.assert_allclose(many, one, rtol=0, atol=1e-4 if ON_GPUS else 1e-5)
