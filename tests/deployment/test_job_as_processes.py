"""The pods of a job, an evaluator and fleets as processes: commands and variables, volumes as folders, host names."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml

from testkit.hosts import Host, connected_hosts
from testkit.manifests import KUBERNETES, Pod, image_environment, overlay, pods, render
from testkit.preloading import preloaded
from testkit.training_harness import Task, leave_none
from understudy.checkpoints import RunDir
from understudy.checkpoints.evaluation_results import EvaluationResults
from understudy.evaluator.serving.following import DOWNLOADS_DIR
from understudy.experiments import load_experiment
from understudy.trainer import TrainSettings, train

pytestmark = pytest.mark.long

STEPS = 40
SMALLER = """
- { op: replace, path: /spec/replicatedJobs/%d/template/spec/template/spec/containers/0/args/3, value: --steps=40 }
- op: replace
  path: /spec/replicatedJobs/%d/template/spec/template/spec/containers/0/args/4
  value: --checkpoint-every=20
"""
OF_THE_IMAGE_ALONE = {"PATH", "PYTHONDONTWRITEBYTECODE"}


def smaller_job(folder: Path) -> list[Pod]:
    """Render an overlay of the overlay, as a user writes it for a job of their own."""
    patches = [{"target": {"kind": "JobSet"}, "patch": SMALLER % (job, job)} for job in range(2)]
    folder.mkdir()
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(KUBERNETES / "overlays" / "job", folder.resolve())],
        "patches": patches,
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization), encoding="utf-8")
    return [*pods(render(folder))]


def host_name(pod: Pod, index: int) -> str:
    """Return the name that the headless service gives a pod of a JobSet, or the only pod of a Deployment."""
    owner = pod.owner["metadata"]["name"]
    return f"{owner}-{pod.role}-0-{index}.{owner}" if pod.job else str(owner)


def start(pod: Pod, index: int, host: Host, volumes: Path) -> Task:
    """Start a pod's container on a host. A claim is one folder for all pods, other volumes are a folder of this pod."""
    jobset = pod.owner["metadata"]["name"]
    labels = {"jobset.sigs.k8s.io/jobset-name": jobset, "jobset.sigs.k8s.io/replicatedjob-name": pod.role}
    shared = {volume["name"] for volume in pod.spec["volumes"] if "persistentVolumeClaim" in volume}
    folders: dict[str, str] = {}
    for mount in pod.container["volumeMounts"]:
        folder = volumes / mount["name"] if mount["name"] in shared else volumes / f"{pod.role}-{index}" / mount["name"]
        folder.mkdir(parents=True, exist_ok=True)
        folders[mount["mountPath"]] = str(folder)
    image = {key: value for key, value in image_environment().items() if key not in OF_THE_IMAGE_ALONE}
    environment = image | pod.environment(labels) | {"JOB_COMPLETION_INDEX": str(index), "TMPDIR": "/tmp"}  # noqa: S108
    read_only = [folders[mount["mountPath"]] for mount in pod.container["volumeMounts"] if mount.get("readOnly")]
    mounts = "".join(f"mount --bind {each} {each} && mount -o remount,ro,bind {each} && " for each in read_only)
    own_mounts = [*host.inside, "sh", "-c", f'{mounts}exec "$@"', "sh"]
    arguments = [placed(word, folders) for word in pod.container["args"]]
    return Task(
        subprocess.Popen(
            [*own_mounts, sys.executable, "-m", "understudy.cli", *arguments],
            env={**os.environ, **preloaded(), **{key: placed(value, folders) for key, value in environment.items()}},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    )


def placed(text: str, folders: Mapping[str, str]) -> str:
    """Return a word of a command line, or a variable, with the folders of the volumes."""
    option, separator, value = text.rpartition("=")
    for mount, folder in folders.items():
        if value == mount or value.startswith(f"{mount}/"):
            return f"{option}{separator}{folder}{value.removeprefix(mount)}"
    return text


@contextlib.contextmanager
def running(job: list[Pod], volumes: Path) -> Iterator[dict[str, Task]]:
    """Run all pods of a job, each on a host with its name; none outlives the block."""
    members = [(pod, index) for pod in job for index in range(pod.count)]
    names = [host_name(pod, index) for pod, index in members]
    with connected_hosts(len(members), host_names=names) as hosts:
        tasks: dict[str, Task] = {}
        try:
            for (pod, index), host in zip(members, hosts, strict=True):
                tasks[f"{pod.role} {index}"] = start(pod, index, host, volumes)
            yield tasks
        finally:
            leave_none([*tasks.values()])


@pytest.mark.timeout(600)
def test_the_job_ends_with_its_last_score_and_a_fleet_serves_what_it_left(tmp_path: Path) -> None:
    fleet = pods(overlay("fleet"))
    with running([*smaller_job(tmp_path / "overlay"), *fleet], tmp_path / "volumes") as tasks:
        server = tasks.pop("understudy-fleet 0")
        assert [*tasks] == ["worker 0", "worker 1", "evaluator 0"]
        statuses = {name: task.end() for name, task in tasks.items()}
        errors = {name: task.errors for name, task in tasks.items()}
        assert statuses == dict.fromkeys(tasks, 0), errors

        run_dir = RunDir(tmp_path / "volumes" / "run")
        assert run_dir.committed_steps() == [20, STEPS]
        results = {result.step: result for result in EvaluationResults(run_dir.evaluator).read()}
        assert results[STEPS].settled
        assert results[STEPS].scores.keys() == {"validation", "test"}

        server.wait_for("READY")
        server.process.terminate()
        assert server.end() == 0, server.errors
    for name, said in errors.items():
        assert f"this task is {name} of the cluster worker=2, evaluator=1, by the variables of JobSet" in said
    assert json.loads((run_dir.evaluator / "serving.json").read_text())["step"] == STEPS


@pytest.mark.timeout(600)
def test_a_fleet_serves_what_the_evaluator_sends_it_without_the_volume_of_the_run(tmp_path: Path) -> None:
    train(load_experiment("digits"), TrainSettings(run_dir=tmp_path / "volumes" / "run", steps=20, checkpoint_every=20))
    with running([*pods(overlay("evaluator")), *pods(overlay("fleet-network"))], tmp_path / "volumes") as tasks:
        evaluator, server = (tasks[f"understudy-{name} 0"] for name in ("evaluator", "fleet"))
        server.wait_for("READY")
        for each in (server, evaluator):
            each.process.terminate()
            assert each.end() == 0, each.errors
    own = tmp_path / "volumes" / "understudy-fleet-0"
    assert {each.name for each in own.iterdir()} == {"state", "tmp", "shm"}
    assert RunDir(own / "state" / DOWNLOADS_DIR).committed_steps() == [20]
