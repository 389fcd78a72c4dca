"""``understudy train`` as a user types it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from testkit.preloading import HEEDING_HANGUP, preloaded
from testkit.training_harness import start_training, weights_of
from understudy.checkpoints import DirectoryLock, RunDir
from understudy.cli.main import main

pytestmark = pytest.mark.long

OPTIONS = ("--steps", "10", "--checkpoint-every", "10", "--no-tensorboard")


def test_logical_cpus_train_with_the_default_reduction(tmp_path: Path, one_device: tuple[Path, list[Any]]) -> None:
    mirrored = ("--strategy", "mirrored", "--logical-cpus", "2", "--progress", "json")
    task = start_training("Dense", tmp_path, *OPTIONS, *mirrored)
    assert task.end() == 0, task.errors
    started = json.loads(task.lines[0])
    assert started["replicas"] == 2
    assert [device.split()[0] for device in started["devices"]] == ["device=CPU:0", "device=CPU:1"]
    for one, many in zip(weights_of(one_device[0], 10), weights_of(tmp_path, 10), strict=True):
        np.testing.assert_allclose(many, one, rtol=0, atol=1e-5)


def test_a_terminal_that_closes_loses_no_step(tmp_path: Path) -> None:
    endless = ("--steps", "1000000", "--checkpoint-every", "1000000", "--no-tensorboard", "--keep-checkpoints", "3")
    task = start_training("Dense", tmp_path, *endless, inside=HEEDING_HANGUP)
    task.wait_for("step ")
    task.process.send_signal(signal.SIGHUP)
    assert task.end() == 143, task.errors
    (step,) = RunDir(tmp_path).committed_steps()
    assert f"asked to end by SIGTERM; step {step} is saved" in task.errors


EAGER_MODULE = """
import tensorflow as tf

raise RuntimeError(f"TensorFlow runs with {len(tf.config.list_logical_devices('CPU'))} devices")
"""
"""Asking for logical devices starts TensorFlow, as many a module does when it is imported."""


def test_the_devices_are_laid_out_before_the_user_s_module_is_imported(tmp_path: Path) -> None:
    module = tmp_path / "eager.py"
    module.write_text(EAGER_MODULE, encoding="utf-8")
    options = ["--run-dir", str(tmp_path), "--steps", "1", "--strategy", "mirrored", "--logical-cpus", "2"]

    ran = subprocess.run(
        [sys.executable, "-m", "understudy.cli", "train", f"{module}:EXPERIMENT", *options],
        env={**os.environ, **preloaded()},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )

    assert "TensorFlow runs with 2 devices" in ran.stderr


@pytest.mark.parametrize(
    ("options", "tf_config", "status", "message"),
    [
        (("--strategy", "multi_worker"), None, 1, "TF_CONFIG is unset or has no cluster"),
        (("--strategy", "multi_worker"), "{", 1, "TF_CONFIG is not JSON"),
        (("--strategy", "mirrored", "--cross-device-ops", "nccl"), None, 1, "nccl, which needs GPUs"),
        (("--global-batch-size", "5000"), None, 1, "1200 examples, fewer than one global batch of 5000"),
        (("--steps", "0"), None, 2, "--steps"),
        (("--strategie", "mirrored"), None, 2, "--strategy"),
    ],
)
def test_a_user_error_is_one_line(
    tmp_path: Path, options: tuple[str, ...], tf_config: str | None, status: int, message: str
) -> None:
    result = CliRunner(env={"TF_CONFIG": tf_config}).invoke(
        main, ["train", "digits", "--run-dir", str(tmp_path), *OPTIONS, *options]
    )
    assert result.exit_code == status, result.output
    assert message in result.stderr.splitlines()[-1]


def test_a_second_chief_in_a_run_folder_is_refused_and_told_of_the_first(tmp_path: Path) -> None:
    with DirectoryLock(tmp_path):
        result = CliRunner().invoke(main, ["train", "digits", "--run-dir", str(tmp_path), *OPTIONS])
    assert result.exit_code == 1
    last = result.stderr.splitlines()[-1]
    assert f"{tmp_path} is in use by process {os.getpid()}" in last
    assert "--run-dir" in last


def test_a_loss_that_is_not_finite_has_an_exit_status_of_its_own(tmp_path: Path) -> None:
    task = start_training("Exploding", tmp_path, *OPTIONS)
    assert task.end() == 3
    assert "Error: the loss became nan by step 10" in task.errors
