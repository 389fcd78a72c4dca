"""The manifests of a training job: its cluster, its restarts, its end, and its GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from testkit.manifests import (
    by_kind,
    documents_of,
    given_labels,
    pods_of,
    replicated_jobs,
)
from understudy.cli.command_errors import TRAINING_FAILED
from understudy.cli.supervisor import RESTARTABLE
from understudy.trainer import NonFiniteLossError, TFConfigError
from understudy.trainer.cluster_variables import adopt
from understudy.trainer.settings import ClusterSettings
from understudy.trainer.tf_config import parse

USAGE_ERROR = 2


@pytest.mark.parametrize("name", ["job", "job-gpu", "trainjob", "chart-job"])
def test_every_task_of_a_job_derives_the_same_cluster(name: str) -> None:
    documents = documents_of(name)
    tasks = [pod for pod in pods_of(name) if pod.job is not None]
    jobs = by_kind(documents, "TrainJob")
    changed = {each["name"]: each["value"] for job in jobs for each in job["spec"]["trainer"]["env"]}
    own_name = jobs[0]["metadata"]["name"] if jobs else tasks[0].owner["metadata"]["name"]
    clusters = []
    for pod in tasks:
        count = jobs[0]["spec"]["trainer"]["numNodes"] if jobs and pod.role == "node" else pod.count
        for index in range(count):
            labels = {**given_labels(pod), "jobset.sigs.k8s.io/jobset-name": own_name}
            environ = {**pod.environment(labels), "JOB_COMPLETION_INDEX": str(index)}
            if pod.role == "node":
                environ |= changed
            line = adopt(environ, settings_of(environ))
            assert line is not None
            assert "by the variables of JobSet" in line
            task = parse(environ)
            assert task is not None
            address = f"{own_name}-{pod.role}-0-{index}.{own_name}:2222"
            assert task.cluster[task.role][task.index] == address
            clusters.append(task.cluster["worker"] if task.role == "worker" else None)
    workers = [cluster for cluster in clusters if cluster]
    assert len(workers) == len(workers[0])
    assert len({*workers}) == 1


def settings_of(environ: Mapping[str, str]) -> ClusterSettings:
    tasks = dict(each.split("=") for each in environ["UNDERSTUDY_CLUSTER_TASKS"].split(","))
    return ClusterSettings(cluster_tasks={role: int(count) for role, count in tasks.items()})


@pytest.mark.parametrize("name", ["job", "trainjob", "chart-job"])
def test_a_job_starts_again_after_the_statuses_that_a_restart_mends_and_no_others(name: str) -> None:
    hopeless_training = {TFConfigError.exit_code, USAGE_ERROR, NonFiniteLossError.exit_code}
    hopeless_evaluation = {1, USAGE_ERROR, TRAINING_FAILED}
    for document in documents_of(name):
        for replicated in replicated_jobs(document):
            job = replicated["template"]["spec"]
            assert job["template"]["spec"]["restartPolicy"] == "Never"  # which a failure policy requires
            (rule,) = [rule for rule in job["podFailurePolicy"]["rules"] if rule["action"] == "FailJob"]
            (container,) = job["template"]["spec"]["containers"]
            assert rule["onExitCodes"]["containerName"] == container["name"]
            statuses = {*rule["onExitCodes"]["values"]}
            assert statuses == (hopeless_evaluation if replicated["name"] == "evaluator" else hopeless_training)
            assert not statuses & {*RESTARTABLE}
            assert "--exit-when-finished" in container["args"]
            # Workers start again together, by the JobSet; the evaluator alone, by its Job.
            assert (job["backoffLimit"] == 0) == (replicated["name"] != "evaluator")


@pytest.mark.parametrize("name", ["job", "trainjob", "chart-job"])
def test_a_job_succeeds_with_its_evaluator(name: str) -> None:
    found = 0
    for document in documents_of(name):
        if replicated_jobs(document):
            spec = document["spec"] if document["kind"] == "JobSet" else document["spec"]["template"]["spec"]
            assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["evaluator"]}
            (rule,) = spec["failurePolicy"]["rules"]
            assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
            assert spec["failurePolicy"]["maxRestarts"] > 0
            found += 1
    assert found == 1


@pytest.mark.parametrize("name", ["evaluator-gpu", "job-gpu"])
def test_with_gpus_every_pod_has_one_and_is_told_to_use_it(name: str) -> None:
    for pod in pods_of(name):
        assert pod.container["resources"]["limits"]["nvidia.com/gpu"] >= 1
        assert pod.environment(given_labels(pod))["UNDERSTUDY_DEVICES"] == "GPU"
        assert pod.container["image"].endswith("-gpu")


def test_an_evaluator_with_gpus_keeps_compiled_kernels() -> None:
    (pod,) = pods_of("evaluator-gpu")
    mounts = {mount["mountPath"]: mount["name"] for mount in pod.container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
    cache = pod.environment({})["CUDA_CACHE_PATH"]
    assert "persistentVolumeClaim" in volumes[mounts[str(Path(cache).parent)]]
