"""Shared by the trainer's tests."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def split_cpu(logical_cpus: tuple[str, ...]) -> None:
    """Split the CPU before any trainer test uses TensorFlow."""
    del logical_cpus


@pytest.fixture(scope="session")
def one_device(tmp_path_factory: pytest.TempPathFactory, split_cpu: None) -> tuple[Path, list[Any]]:
    """A finished training of the dense model on one device, and its events."""
    del split_cpu
    from testkit.training_harness import Dense, run
    from understudy.trainer import JsonLinesReporter

    run_dir = tmp_path_factory.mktemp("one_device")
    events = io.StringIO()
    run(Dense(), run_dir, progress=JsonLinesReporter(events), tensorboard=True)
    return run_dir, [json.loads(line) for line in events.getvalue().splitlines()]
