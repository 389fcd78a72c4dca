"""TF_CONFIG from the variables of JobSet, TrainJob, Slurm and Vertex AI; docs/decisions/clusters.md has the sources."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

import pytest

from understudy.trainer import TFConfigError
from understudy.trainer.cluster_variables import adopt
from understudy.trainer.settings import ClusterSettings
from understudy.trainer.tf_config import parse

JOBSET = {"JOBSET_NAME": "digits", "REPLICATED_JOB_NAME": "worker", "JOB_COMPLETION_INDEX": "1", "JOB_INDEX": "0"}
TRAINJOB = {"HOSTNAME": "digits-node-0-1", "JOB_COMPLETION_INDEX": "1"}
SLURM = {
    "SLURM_STEP_NODELIST": "gpu[09-10]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
}
VERTEX = {
    "CLUSTER_SPEC": '{"cluster":{"workerpool0":["cmle-training-workerpool0-4c1d6d97d0-0:2222"],"workerpool1":'
    '["cmle-training-workerpool1-4c1d6d97d0-0:2222","cmle-training-workerpool1-4c1d6d97d0-1:2222"],"workerpool3":'
    '["cmle-training-workerpool3-4c1d6d97d0-0:2222"]},"environment":"cloud","task":{"type":"workerpool1","index":1},'
    '"job":"{\\"python_module\\":\\"\\",\\"package_uris\\":[],\\"job_args\\":[]}","open_ports":[3333]}'
}
EXPLICIT = {"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}'}

TASKS = {"worker": 2, "evaluator": 1}
DESCRIBED = (
    ("JobSet", JOBSET),
    ("a TrainJob's plain runtime", TRAINJOB),
    ("Slurm", SLURM),
    ("Vertex AI", VERTEX),
    ("TF_CONFIG", EXPLICIT),
)


def adopted(
    environ: Mapping[str, str], tasks: Mapping[str, int] = TASKS, port: int = 2222
) -> tuple[dict[str, Any], str]:
    """Return the TF_CONFIG that these variables make, and the line for the log."""
    changed = dict(environ)
    line = adopt(changed, ClusterSettings(cluster_tasks=tasks, cluster_port=port))
    assert line is not None
    assert parse(changed) is not None
    return json.loads(changed["TF_CONFIG"]), line


def test_a_jobset_s_tasks_are_reached_by_the_names_of_its_headless_service() -> None:
    config, line = adopted(JOBSET)
    assert config == {
        "cluster": {
            "worker": ["digits-worker-0-0.digits:2222", "digits-worker-0-1.digits:2222"],
            "evaluator": ["digits-evaluator-0-0.digits:2222"],
        },
        "task": {"type": "worker", "index": 1},
    }
    assert line == (
        "this task is worker 1 of the cluster worker=2, evaluator=1, by the variables of JobSet (JOBSET_NAME, "
        "REPLICATED_JOB_NAME, JOB_COMPLETION_INDEX)"
    )


def test_the_replicated_job_named_node_of_a_training_runtime_holds_the_workers() -> None:
    config, _ = adopted({**JOBSET, "REPLICATED_JOB_NAME": "node"}, {"node": 2, "evaluator": 1})
    assert config["cluster"]["worker"] == ["digits-node-0-0.digits:2222", "digits-node-0-1.digits:2222"]
    assert config["task"] == {"type": "worker", "index": 1}


@pytest.mark.parametrize(("index", "task"), [("0", ("worker", 0)), ("1", ("worker", 1)), ("2", ("evaluator", 0))])
def test_the_nodes_of_a_trainjob_get_the_roles_in_the_given_order(index: str, task: tuple[str, int]) -> None:
    environ = {"HOSTNAME": f"digits-node-0-{index}", "JOB_COMPLETION_INDEX": index}
    config, line = adopted(environ, port=3333)
    assert config["cluster"]["worker"] == ["digits-node-0-0.digits:3333", "digits-node-0-1.digits:3333"]
    assert (config["task"]["type"], config["task"]["index"]) == task
    assert "a TrainJob's plain runtime (HOSTNAME, JOB_COMPLETION_INDEX)" in line


def test_an_indexed_job_of_its_own_is_no_trainjob() -> None:
    assert adopt({"HOSTNAME": "digits-1", "JOB_COMPLETION_INDEX": "1"}, ClusterSettings()) is None


def test_slurm_s_tasks_have_the_order_of_its_list_and_successive_ports_on_a_node() -> None:
    config, _ = adopted(SLURM)
    assert config == {
        "cluster": {"worker": ["gpu09:2222", "gpu09:2223"], "evaluator": ["gpu10:2222"]},
        "task": {"type": "evaluator", "index": 0},
    }


def test_slurm_s_tasks_are_workers_unless_it_is_said_otherwise() -> None:
    """Where srun did not say how many tasks a node has, it has one."""
    environ = {"SLURM_STEP_NODELIST": "n[9-10]", "SLURM_PROCID": "1"}
    config, _ = adopted(environ, {})
    assert config == {"cluster": {"worker": ["n9:2222", "n10:2222"]}, "task": {"type": "worker", "index": 1}}


def test_a_shell_that_srun_opened_is_no_cluster() -> None:
    """The variables of ``srun --pty bash`` on one node of a larger job."""
    shell = {
        "SLURM_NODELIST": "GPU71E4",
        "SLURM_TASKS_PER_NODE": "8",
        "SLURM_STEP_NODELIST": "GPU71E4",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_TASKS_PER_NODE": "1",
        "SLURM_PROCID": "0",
        "SLURM_NODEID": "0",
    }
    assert adopt(dict(shell), ClusterSettings()) is None
    config, line = adopted({**shell, **EXPLICIT})
    assert config == json.loads(EXPLICIT["TF_CONFIG"])
    assert line == "this task is worker 0 of the cluster worker=2, by TF_CONFIG"


def test_the_worker_pools_of_vertex_ai_are_chief_workers_ps_and_evaluator() -> None:
    config, _ = adopted(VERTEX)
    assert config == {
        "cluster": {
            "chief": ["cmle-training-workerpool0-4c1d6d97d0-0:2222"],
            "worker": ["cmle-training-workerpool1-4c1d6d97d0-0:2222", "cmle-training-workerpool1-4c1d6d97d0-1:2222"],
            "evaluator": ["cmle-training-workerpool3-4c1d6d97d0-0:2222"],
        },
        "task": {"type": "worker", "index": 1},
    }


@pytest.mark.parametrize(("earlier", "later"), [*itertools.combinations(DESCRIBED, 2)])
def test_of_two_descriptions_the_earlier_kind_wins(
    earlier: tuple[str, dict[str, str]], later: tuple[str, dict[str, str]]
) -> None:
    alone, _ = adopted(earlier[1])
    both, line = adopted({**later[1], **earlier[1]})
    assert both == alone
    assert f"by the variables of {earlier[0]} (" in line
    assert line.endswith("; TF_CONFIG was set as well, and is not used") == (later[0] == "TF_CONFIG")


def test_without_any_of_them_there_is_no_cluster() -> None:
    environ = {"HOSTNAME": "laptop", "CLUSTER_SPEC": " ", "TF_CONFIG": ""}
    assert adopt(environ, ClusterSettings(cluster_tasks=TASKS)) is None
    assert environ["TF_CONFIG"] == ""


@pytest.mark.parametrize(
    ("environ", "tasks", "message"),
    [
        (JOBSET, {}, "^REPLICATED_JOB_NAME is 'worker', but --cluster-tasks has no tasks; .*worker=2,evaluator=1"),
        (JOBSET, {"chief": 1}, "^REPLICATED_JOB_NAME is 'worker', but --cluster-tasks has chief"),
        (JOBSET, {"worker": 1}, r"^JOB_COMPLETION_INDEX is 1, but --cluster-tasks has worker=1"),
        (JOBSET, {"worker": 2, "node": 1}, "two of which are one role"),
        (JOBSET, {"worker": 2, "wroker": 1}, "^--cluster-tasks names 'wroker'; expected one of chief"),
        ({**JOBSET, "REPLICATED_JOB_NAME": "trainer"}, TASKS, "^REPLICATED_JOB_NAME names 'trainer'"),
        ({**JOBSET, "JOB_INDEX": "1"}, TASKS, "^JOB_INDEX is '1'; a role is one Job here"),
        ({**JOBSET, "JOB_COMPLETION_INDEX": ""}, TASKS, "^JOB_COMPLETION_INDEX is missing; .*completionMode: Indexed"),
        ({**JOBSET, "JOB_COMPLETION_INDEX": "-1"}, TASKS, "^JOB_COMPLETION_INDEX is '-1'"),
        (TRAINJOB, {}, "^--cluster-tasks is missing; HOSTNAME is 'digits-node-0-1'"),
        (TRAINJOB, {"worker": 1}, "^JOB_COMPLETION_INDEX is 1, but the cluster has 1 tasks"),
        (SLURM, {"worker": 2}, "^--cluster-tasks is worker=2, which is not the 3 tasks that were started"),
        ({**SLURM, "SLURM_PROCID": "3"}, TASKS, "^SLURM_PROCID is 3, but the cluster has 3 tasks"),
        ({**SLURM, "SLURM_PROCID": "one"}, TASKS, "^SLURM_PROCID is 'one'; expected a number"),
        ({**SLURM, "SLURM_NODEID": "0"}, TASKS, "^SLURM_NODEID is '0', .*--distribution=block"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "3"}, TASKS, "has 1 nodes, but SLURM_STEP_NODELIST has 2"),
        ({**SLURM, "SLURM_STEP_NODELIST": "gpu[09"}, TASKS, "^SLURM_STEP_NODELIST is"),
        ({"CLUSTER_SPEC": "{"}, {}, "^CLUSTER_SPEC is not JSON"),
        ({"CLUSTER_SPEC": "[]"}, {}, r"^CLUSTER_SPEC is '\[\]'; expected an object"),
        ({"CLUSTER_SPEC": '{"cluster": {"workerpool0": "a:1"}, "task": {"type": "workerpool0"}}'}, {}, "a list such"),
        ({"CLUSTER_SPEC": '{"cluster": {"pool": ["a:1"]}, "task": {"type": "pool"}}'}, {}, "^cluster names the type"),
        (EXPLICIT | {"TF_CONFIG": "{"}, {}, "^TF_CONFIG is not JSON"),
    ],
)
def test_an_error_names_the_variable_at_fault(environ: dict[str, str], tasks: dict[str, int], message: str) -> None:
    with pytest.raises(TFConfigError, match=message):
        adopt(dict(environ), ClusterSettings(cluster_tasks=tasks))


def test_two_tasks_of_a_node_cannot_go_beyond_the_largest_port() -> None:
    with pytest.raises(TFConfigError, match=r"^cluster\.worker\[1\] is 'gpu09:65536'"):
        adopt(dict(SLURM), ClusterSettings(cluster_tasks=TASKS, cluster_port=65535))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cluster_tasks": {"worker": 0}}, "^cluster_tasks has worker=0; expected at least one"),
        ({"cluster_port": 0}, "^cluster_port is 0; expected 1 to 65535"),
    ],
)
def test_a_setting_out_of_range_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClusterSettings(**values)
