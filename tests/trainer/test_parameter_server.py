"""Asynchronous training: a chief, two workers and a parameter server as processes on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from testkit.ports import BEHIND_A_PROXY
from testkit.preloading import preloaded
from testkit.training_harness import TIMEOUT_SECONDS, Noisy, assert_one_architecture, cluster, run
from understudy.checkpoints import RunDir, TrainingJournal, read_manifest, read_training_status
from understudy.checkpoints.layout import MODEL_FILE
from understudy.experiments.arrays import array_examples
from understudy.trainer import ClusterError, DataError, PeerLostError, TFConfigError, TrainSettings
from understudy.trainer.parameter_server.parameter_server_job import ParameterServerJob
from understudy.trainer.parameter_server.servers import wait_for_chief
from understudy.trainer.strategies import training_task

pytestmark = pytest.mark.long

ROLES = ("chief", "worker", "worker", "ps")
OPTIONS = ("--checkpoint-every", "20", "--steps-per-call", "10", "--no-tensorboard", "--keep-checkpoints", "100000")
PEER_LOST = 4


@pytest.fixture(scope="module")
def after_the_kills(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, list[int], float]:
    """Both workers are killed and come back, one after the other; then the parameter server dies."""
    run_dir = RunDir(tmp_path_factory.mktemp("parameter_server"))
    endless = (*OPTIONS, "--steps", "1000000")
    environs = [BEHIND_A_PROXY] * len(ROLES)
    with cluster(
        "Noisy", run_dir.root, *endless, roles=ROLES, strategy="parameter_server", verb="run", environs=environs
    ) as tasks:
        chief, first, second, ps = tasks
        chief.wait_for("published step")
        for worker in (first, second):
            worker.restart()
            worker.wait_until_it_serves()
            for _ in range(2):
                chief.wait_for("published step")
        killed_at = ps.kill()
        statuses = [task.end() for task in (chief, first, second)]
        took = time.monotonic() - killed_at
        assert "another task of the cluster died; start every task again (ps 0: " in chief.errors
    return run_dir, statuses, took


def test_a_killed_worker_rejoins_and_a_killed_ps_ends_the_job(
    after_the_kills: tuple[RunDir, list[int], float],
) -> None:
    run_dir, statuses, took = after_the_kills
    assert len(run_dir.committed_steps()) >= 5
    assert statuses == [PEER_LOST] * 3
    assert took < 120.0
    status = read_training_status(run_dir, now=0.0)
    assert status is not None
    assert status.state == "failed"


def test_it_resumes_from_the_last_checkpoint_and_every_applied_update_is_counted(
    after_the_kills: tuple[RunDir, list[int], float],
) -> None:
    run_dir, _, _ = after_the_kills
    last = run_dir.committed_steps()[-1]
    options = (*OPTIONS, "--steps", str(last + 30))
    with cluster("Noisy", run_dir.root, *options, roles=ROLES, strategy="parameter_server") as tasks:
        assert [task.end() for task in tasks] == [0, 0, 0, 0], [task.errors for task in tasks]
        assert f"resuming after step {last}" in "".join(tasks[0].lines)
    assert run_dir.committed_steps()[-1] >= last + 30
    assert_one_architecture(run_dir.root)
    for step in run_dir.committed_steps():
        model = keras.models.load_model(run_dir.checkpoint(step) / MODEL_FILE)
        assert int(model.optimizer.iterations) == step
        metrics = read_manifest(run_dir.checkpoint(step)).metrics
        assert set(metrics) == {"loss", "accuracy"}
        assert 0.0 < metrics["accuracy"] <= 1.0


def test_an_update_of_a_worker_that_died_before_it_said_so_is_a_step(tmp_path: Path) -> None:
    program = Path(__file__).with_name("update_without_result.py")
    ended = subprocess.run(
        [sys.executable, program, tmp_path],
        env={**os.environ, **preloaded()},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1]) == [[5, 5], [11, 11], [15, 15]]


def test_the_chief_s_journal_tells_the_others_how_it_ended(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)

    def finish(_: float) -> None:
        with TrainingJournal(run_dir) as journal:
            journal.record_step(8)

    def fail(_: float) -> None:
        with pytest.raises(RuntimeError), TrainingJournal(run_dir):
            raise RuntimeError("no luck")

    with pytest.raises(PeerLostError, match="RuntimeError: no luck"):
        wait_for_chief(run_dir, steps=9, timeout_seconds=1.0, sleep=fail)
    assert wait_for_chief(run_dir, steps=9, timeout_seconds=1.0, sleep=finish) == 8
    # What an earlier chief left behind says nothing about this one, unless there is nothing left to do.
    assert wait_for_chief(run_dir, steps=8, timeout_seconds=1.0) == 8
    ticks = iter(range(100))
    with pytest.raises(ClusterError, match="waited 3 s for the chief"):
        wait_for_chief(run_dir, steps=9, timeout_seconds=3.0, clock=lambda: next(ticks), sleep=lambda _: None)


@pytest.mark.parametrize(
    ("cluster_spec", "role", "message"),
    [
        ('{"worker": ["a:1"], "ps": ["p:1"]}', "worker", "^cluster.chief is missing"),
        ('{"chief": ["c:1"], "worker": ["a:1"]}', "worker", "^cluster.ps is missing"),
        ('{"chief": ["c:1"], "worker": ["a:1"], "ps": ["p:1"], "evaluator": ["e:1"]}', "evaluator", "does not train"),
    ],
)
def test_a_cluster_that_cannot_train_asynchronously_is_refused(
    tmp_path: Path, cluster_spec: str, role: str, message: str
) -> None:
    settings = TrainSettings(run_dir=tmp_path, steps=1, strategy="parameter_server")
    config = f'{{"cluster": {cluster_spec}, "task": {{"type": "{role}", "index": 0}}}}'
    with pytest.raises(TFConfigError, match=message):
        training_task(settings, {"TF_CONFIG": config})


def test_arrays_which_the_workers_cannot_read_are_refused(tmp_path: Path) -> None:
    class Arrays(Noisy):
        def training_data(self) -> Any:
            return array_examples((np.zeros((50, 8)), np.zeros(50)))

    settings = TrainSettings(run_dir=tmp_path, steps=1, strategy="parameter_server")
    with pytest.raises(DataError, match="arrays in Python, which the workers of parameter_server cannot run"):
        ParameterServerJob(Arrays(), settings, tf.distribute.get_strategy())


def test_without_tf_config_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TFConfigError, match="the parameter_server strategy needs it in every task"):
        run(Noisy(), tmp_path, strategy="parameter_server")
