"""Two workers and the evaluator on hosts of their own, which reach each other by their addresses alone."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit.hosts import Host, connected_hosts
from testkit.preloading import preloaded
from testkit.training_harness import Task, leave_none, start_training, tf_config
from understudy.checkpoints import RunDir

pytestmark = pytest.mark.long

STEPS = 40
OPTIONS = ("--steps", str(STEPS), "--checkpoint-every", "20", "--no-tensorboard", "--wait-for-evaluation", "60")
SECONDS = 60.0


@contextlib.contextmanager
def tasks_on(hosts: list[Host], run_dir: Path) -> Iterator[list[Task]]:
    """Run a worker on each host but the last, which evaluates; none outlives the block."""
    *workers, evaluator = hosts
    spec = {"worker": [f"{host.address}:2222" for host in workers], "evaluator": [f"{evaluator.address}:2222"]}
    members = [("worker", index) for index in range(len(workers))] + [("evaluator", 0)]
    tasks: list[Task] = []
    try:
        for host, (role, index) in zip(hosts, members, strict=True):
            environ = {"TF_CONFIG": tf_config(spec, role, index), **preloaded()}
            options = (*OPTIONS, "--host", host.address, "--insecure")
            tasks.append(start_training("Scored", run_dir, *options, environ=environ, verb="run", inside=host.inside))
        yield tasks
    finally:
        leave_none(tasks)


def ask(host: Host, *arguments: str) -> str:
    """Run a command of ours on a host; return what it prints."""
    command = [*host.inside, sys.executable, "-m", "understudy.cli", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS).stdout


@pytest.mark.timeout(600)
def test_workers_train_and_the_evaluator_scores_and_serves_across_hosts(tmp_path: Path) -> None:
    with connected_hosts(3) as hosts, tasks_on(hosts, tmp_path) as (chief, other, evaluator):
        assert (chief.end(), other.end()) == (0, 0), chief.errors + other.errors
        assert RunDir(tmp_path).committed_steps() == [20, STEPS]

        status = json.loads(ask(hosts[0], "status", "--target", f"{hosts[-1].address}:8500", "--json"))
        assert status["serving_step"] == STEPS

        evaluator.process.terminate()
        assert evaluator.end() == 0, evaluator.errors
