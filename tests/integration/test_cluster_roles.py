"""``understudy run`` in every task of a cluster, the evaluator among them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import keras
import pytest

from testkit.front_ends import FRONT_ENDS
from testkit.ports import free_ports
from testkit.preloading import preloaded
from testkit.training_harness import BATCH, Scored, cluster, start_training, tf_config
from understudy.checkpoints import RunDir
from understudy.checkpoints.evaluation_results import EvaluationResults
from understudy.checkpoints.layout import MODEL_FILE

pytestmark = pytest.mark.long

OPTIONS = ("--checkpoint-every", "20", "--steps-per-call", "10", "--no-tensorboard")
SERVING = ("--grpc-port", "0", "--http-port", "0", "--exit-when-finished")


@pytest.mark.parametrize("supervised", [(), ("--restarts", "1")], ids=["alone", "supervised"])
@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_an_evaluator_drains_when_its_scheduler_ends_all_its_processes(
    tmp_path: Path, front_end: str, supervised: tuple[str, ...]
) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text("timeout_seconds = 10  # of other commands alone\n")
    addresses = {role: [f"127.0.0.1:{port}"] for role, port in zip(("chief", "evaluator"), free_ports(2), strict=True)}
    task = start_training(
        "Scored",
        tmp_path,
        *("--steps", "40", "--frontend", front_end, "--grpc-port", "0", "--http-port", "0", *supervised),
        *("--config", str(settings)),
        environ={"TF_CONFIG": tf_config(addresses, "evaluator", 0)},
        verb="run",
        inside=["setsid"],  # which keeps the process id
    )
    task.wait_for("LISTENING")
    os.killpg(task.process.pid, signal.SIGTERM)
    assert task.end() == 0, task.errors
    assert task.errors.count("draining") == 1
    assert "Error" not in task.errors


@pytest.mark.timeout(600)
def test_the_evaluator_scores_what_the_chief_of_asynchronous_training_publishes(tmp_path: Path) -> None:
    roles = ("chief", "worker", "ps", "evaluator")
    options = (*OPTIONS, *SERVING, "--steps", "40")
    environs = [preloaded()] * len(roles)
    with cluster(
        "Scored", tmp_path, *options, roles=roles, strategy="parameter_server", verb="run", environs=environs
    ) as tasks:
        assert [task.end() for task in tasks] == [0] * len(roles), [task.errors for task in tasks]

    run_dir = RunDir(tmp_path)
    results = {result.step: result for result in EvaluationResults(run_dir.evaluator).read()}
    assert list(results) == run_dir.committed_steps()
    last = run_dir.committed_steps()[-1]
    assert results[last].settled
    model = keras.models.load_model(run_dir.checkpoint(last) / MODEL_FILE)
    data = Scored().evaluation_data()["test"].batch(BATCH)
    expected = model.evaluate(data, return_dict=True, verbose=0)
    assert results[last].scores["test"] == pytest.approx(expected, rel=1e-5)
