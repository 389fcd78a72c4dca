"""Several workers as processes on this machine, each with one CPU replica."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf

from testkit.training_harness import (
    STEPS,
    TIMEOUT_SECONDS,
    Task,
    assert_bit_equal,
    assert_one_architecture,
    cluster,
    state_of,
    weights_of,
)
from understudy.checkpoints import DirectoryLock, RunDir, read_training_status
from understudy.checkpoints.layout import MODEL_FILE
from understudy.trainer import PeerLostError
from understudy.trainer.cluster import peers_watched

OPTIONS = ("--steps", str(STEPS), "--checkpoint-every", "5", "--steps-per-call", "3", "--no-tensorboard")
PEER_LOST = 4

pytestmark = [pytest.mark.long, pytest.mark.timeout(3 * TIMEOUT_SECONDS)]
PREEMPTED = 143


def finish(tasks: list[Task]) -> None:
    for task in tasks:
        assert task.end() == 0, task.errors


@pytest.fixture(scope="module")
def chief_and_worker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted training with BatchNorm and Dropout by a chief and a worker, an evaluator in the cluster."""
    run_dir = tmp_path_factory.mktemp("chief_and_worker")
    with cluster("Noisy", run_dir, *OPTIONS, roles=("chief", "worker"), evaluator=True) as tasks:
        finish(tasks)
        printed = ["published" in "".join(task.lines) for task in tasks]
    assert printed == [True, False]
    return run_dir


def test_a_chief_that_waits_for_the_lock_of_its_run_folder_is_refused_in_the_end(tmp_path: Path) -> None:
    with DirectoryLock(tmp_path), cluster("Dense", tmp_path, *OPTIONS, "--cluster-timeout-seconds", "1") as tasks:
        assert tasks[0].end() == 1
        assert "Error" in tasks[0].errors.splitlines()[-1]
        assert "in use by" in tasks[0].errors.splitlines()[-1]


def test_two_workers_whose_chief_waits_for_the_lock_of_a_lost_machine_give_the_weights_of_one_device(
    one_device: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    with ExitStack() as held:
        held.enter_context(DirectoryLock(tmp_path))
        with cluster("Dense", tmp_path, *OPTIONS, "--communication", "ring") as tasks:
            errors = tasks[0].process.stderr
            assert errors is not None
            line = next(line for line in errors if "in use by" in line)
            assert "waiting up to 300 s" in line
            assert tasks[0].process.poll() is None
            held.close()
            finish(tasks)
    for one, many in zip(weights_of(one_device[0], STEPS), weights_of(tmp_path, STEPS), strict=True):
        np.testing.assert_allclose(many, one, rtol=0, atol=1e-5)


def test_every_worker_drops_out_its_own(chief_and_worker: Path) -> None:
    (seeds,) = [rows for rows in state_of(chief_and_worker, STEPS).values() if rows.shape == (2, 2)]
    assert seeds[0, 0] != seeds[1, 0]
    assert seeds[0, 1] == seeds[1, 1] == STEPS


def test_the_published_model_holds_the_mean_of_the_workers_statistics(chief_and_worker: Path) -> None:
    means, variances = (rows for rows in state_of(chief_and_worker, STEPS).values() if rows.shape == (2, 16))
    model = keras.models.load_model(RunDir(chief_and_worker).checkpoint(STEPS) / MODEL_FILE)
    (norm,) = [layer for layer in model.layers if isinstance(layer, keras.layers.BatchNormalization)]
    assert not np.array_equal(means[0], means[1])
    np.testing.assert_allclose(norm.moving_mean.numpy(), means.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(norm.moving_variance.numpy(), variances.mean(axis=0), rtol=1e-6)


def test_after_a_kill_all_tasks_end_and_say_so(tmp_path: Path) -> None:
    # As many steps as never end, so that the kill comes in the midst of them.
    endless = (*OPTIONS, "--steps", "1000000", "--keep-checkpoints", "1000000")
    with cluster("Linear", tmp_path, *endless, roles=("chief", "worker")) as (chief, worker):
        chief.wait_for("published step 5")
        killed_at = worker.kill()
        assert chief.end() == PEER_LOST, chief.errors
    assert time.monotonic() - killed_at < TIMEOUT_SECONDS / 2
    assert "another task of the cluster died; start every task again" in chief.errors
    status = read_training_status(RunDir(tmp_path), now=0.0)
    assert status is not None
    assert (status.state, status.may_resume) == ("failed", True)


_OF_A_PARAMETER_SERVER = """Graph execution error:

recvmsg:Connection reset by peer
Additional GRPC error information from remote target /job:ps/replica:0/task:0/device:CPU:0 while calling /X/Y:
Additional GRPC error information from remote target /job:worker/replica:0/task:1 while calling /X/Z:
"""


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (_OF_A_PARAMETER_SERVER, "ps 0: recvmsg:Connection reset by peer"),
        ("Socket closed", "Socket closed"),
        ("Graph execution error:\n", "no reason given"),
    ],
)
def test_the_error_about_a_lost_task_names_it_and_what_happened(message: str, reason: str) -> None:
    with pytest.raises(PeerLostError) as raised, peers_watched():
        raise tf.errors.UnavailableError(None, None, message)
    assert str(raised.value) == f"another task of the cluster died; start every task again ({reason})"


def test_sigterm_to_one_task_makes_all_save_the_same_step_and_a_restart_goes_on_there(
    chief_and_worker: Path, tmp_path: Path
) -> None:
    slow = (*OPTIONS, "--no-cache")
    with cluster("Slow", tmp_path, *slow, "--checkpoint-every", "100", roles=("chief", "worker")) as (chief, worker):
        worker.wait_for("step ")
        worker.process.terminate()
        assert (worker.end(), chief.end()) == (PREEMPTED, PREEMPTED), (worker.errors, chief.errors)
    (saved,) = RunDir(tmp_path).committed_steps()
    assert 0 < saved < STEPS
    assert f"step {saved} is saved" in worker.errors
    with cluster("Noisy", tmp_path, *OPTIONS, roles=("chief", "worker")) as tasks:
        finish(tasks)
    assert_bit_equal(state_of(chief_and_worker, STEPS), state_of(tmp_path, STEPS))


def test_run_starts_the_tasks_again_after_a_kill_and_they_come_to_the_same_bits(
    chief_and_worker: Path, tmp_path: Path
) -> None:
    supervised = (*OPTIONS, "--no-cache", "--restarts", "5", "--cluster-timeout-seconds", "50")
    with cluster("Slow", tmp_path, *supervised, roles=("chief", "worker"), verb="run") as tasks:
        tasks[0].wait_for("published step 5")
        (child,) = psutil.Process(tasks[1].process.pid).children()
        child.kill()
        finish(tasks)
    assert "starting it again in" in tasks[1].errors
    assert "resuming after step" in "".join(tasks[1].lines)
    assert_one_architecture(tmp_path)
    assert_bit_equal(state_of(chief_and_worker, STEPS), state_of(tmp_path, STEPS))
