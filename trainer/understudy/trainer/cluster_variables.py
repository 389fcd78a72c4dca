"""Derives TF_CONFIG from the variables that JobSet, Kubeflow's TrainJob, Slurm and Vertex AI give to a task.

The first of these that describes this process wins, and an explicit TF_CONFIG comes last. docs/decisions/clusters.md
has the reasons; docs/how-to/kubernetes.md and docs/how-to/slurm.md show the variables.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from understudy.trainer.settings import ClusterSettings
from understudy.trainer.slurm import expand_nodes, expand_task_counts
from understudy.trainer.tf_config import parse
from understudy.trainer.trainer_errors import TFConfigError

_TF_CONFIG = "TF_CONFIG"
_POOLS = {"workerpool0": "chief", "workerpool1": "worker", "workerpool2": "ps", "workerpool3": "evaluator"}
_TRAINJOB_HOST = re.compile(r"(?P<job>.+)-node-0-(?P<index>\d+)", re.ASCII)
_NODE = "node"
"""Kubeflow's name for the training tasks of a TrainJob."""


@dataclass(frozen=True, kw_only=True)
class _Cluster:
    """What TF_CONFIG will say: the addresses by role, and which task this is."""

    addresses: Mapping[str, Sequence[str]]
    role: str
    index: int

    def as_json(self) -> str:
        cluster = {role: list(addresses) for role, addresses in self.addresses.items()}
        return json.dumps({"cluster": cluster, "task": {"type": self.role, "index": self.index}})


@dataclass(frozen=True, kw_only=True)
class _Source:
    """A system that starts tasks, and how to read its variables; the reader returns None if they are not its own."""

    name: str
    variables: tuple[str, ...]
    read: Callable[[Mapping[str, str], ClusterSettings], _Cluster | None]


def adopt(environ: MutableMapping[str, str], settings: ClusterSettings) -> str | None:
    """Set TF_CONFIG from the variables of the system that started this task, if one of them describes a cluster.

    Args:
        environ: The process's environment; only TF_CONFIG is changed.
        settings: The tasks of the cluster and their port, where the variables do not say.

    Returns:
        A sentence for the log: which task this is, and by which variables; None without a cluster.

    Raises:
        TFConfigError: The variables contradict each other or the settings. The text begins with the variable at fault.
    """
    found = next(
        ((source, cluster) for source in _SOURCES if (cluster := source.read(environ, settings)) is not None), None
    )
    overridden = bool(environ.get(_TF_CONFIG, "").strip())
    if found is not None:
        environ[_TF_CONFIG] = found[1].as_json()
    task = parse(environ)
    if task is None:
        return None
    origin = f"the variables of {found[0].name} ({', '.join(found[0].variables)})" if found else _TF_CONFIG
    tasks = ", ".join(f"{role}={len(addresses)}" for role, addresses in task.cluster.items())
    ignored = f"; {_TF_CONFIG} was set as well, and is not used" if found and overridden else ""
    shape = tasks or "without training tasks"
    return f"this task is {task.role} {task.index} of the cluster {shape}, by {origin}{ignored}"


def _jobset(environ: Mapping[str, str], settings: ClusterSettings) -> _Cluster | None:
    jobset, own = environ.get("JOBSET_NAME"), environ.get("REPLICATED_JOB_NAME")
    if not jobset or not own:
        return None
    if environ.get("JOB_INDEX", "0") != "0":
        raise TFConfigError(
            f"JOB_INDEX is {environ['JOB_INDEX']!r}; a role is one Job here: give the replicated job replicas: 1, and "
            "its tasks as completions and parallelism"
        )
    index = _number(environ, "JOB_COMPLETION_INDEX", "which a Job with completionMode: Indexed sets")
    role, tasks = _role(own, "REPLICATED_JOB_NAME"), settings.cluster_tasks
    if own not in tasks:
        raise TFConfigError(
            f"REPLICATED_JOB_NAME is {own!r}, but --cluster-tasks has {', '.join(tasks) or 'no tasks'}; name every "
            f"replicated job and its completions, as in UNDERSTUDY_CLUSTER_TASKS={own}=2,evaluator=1"
        )
    addresses = {
        _role(name, "--cluster-tasks"): [
            f"{jobset}-{name}-0-{task}.{jobset}:{settings.cluster_port}" for task in range(count)
        ]
        for name, count in tasks.items()
    }
    if len(addresses) < len(tasks):
        raise TFConfigError(f"--cluster-tasks names {', '.join(tasks)}, two of which are one role")
    if index >= tasks[own]:
        raise TFConfigError(f"JOB_COMPLETION_INDEX is {index}, but --cluster-tasks has {own}={tasks[own]} (from 0)")
    return _Cluster(addresses=addresses, role=role, index=index)


def _trainjob(environ: Mapping[str, str], settings: ClusterSettings) -> _Cluster | None:
    match = _TRAINJOB_HOST.fullmatch(environ.get("HOSTNAME", ""))
    if match is None or environ.get("JOB_COMPLETION_INDEX") != match["index"]:
        return None
    if not settings.cluster_tasks:
        raise TFConfigError(
            f"--cluster-tasks is missing; HOSTNAME is {match[0]!r}, a node of a TrainJob, and a plain runtime does not "
            "tell how many nodes it has: set UNDERSTUDY_CLUSTER_TASKS in spec.trainer.env, to worker=3,evaluator=1 or "
            "the like"
        )
    job, count = match["job"], sum(settings.cluster_tasks.values())
    addresses = [f"{job}-node-0-{task}.{job}:{settings.cluster_port}" for task in range(count)]
    return _by_rank(addresses, int(match["index"]), "JOB_COMPLETION_INDEX", settings.cluster_tasks)


def _slurm(environ: Mapping[str, str], settings: ClusterSettings) -> _Cluster | None:
    if not environ.get("SLURM_STEP_NODELIST") or not environ.get("SLURM_PROCID"):
        return None
    nodes = expand_nodes(environ["SLURM_STEP_NODELIST"], "SLURM_STEP_NODELIST")
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE")
    counts = expand_task_counts(per_node, "SLURM_STEP_TASKS_PER_NODE") if per_node else (1,) * len(nodes)
    if len(counts) != len(nodes):
        raise TFConfigError(
            f"SLURM_STEP_TASKS_PER_NODE has {len(counts)} nodes, but SLURM_STEP_NODELIST has {len(nodes)}"
        )
    if sum(counts) == 1:
        return None  # an interactive shell, or a training on one machine
    rank = _number(environ, "SLURM_PROCID", "which srun sets")
    places = [(node, local) for node, count in enumerate(counts) for local in range(count)]
    if rank < len(places):
        _check_place(environ, rank, places[rank][0])
    addresses = [f"{nodes[node]}:{settings.cluster_port + local}" for node, local in places]
    return _by_rank(addresses, rank, "SLURM_PROCID", settings.cluster_tasks or {"worker": len(places)})


def _check_place(environ: Mapping[str, str], rank: int, node: int) -> None:
    """Check that Slurm numbers the tasks node by node."""
    own = environ.get("SLURM_NODEID", str(node))
    if own != str(node):
        raise TFConfigError(
            f"SLURM_NODEID is {own!r}, but task {rank} would be on node {node} if each node's tasks had successive "
            "numbers; start them with srun --distribution=block"
        )


def _vertex(environ: Mapping[str, str], settings: ClusterSettings) -> _Cluster | None:
    del settings
    text = environ.get("CLUSTER_SPEC", "").strip()
    if not text:
        return None
    try:
        spec = json.loads(text)
    except json.JSONDecodeError as error:
        raise TFConfigError(f"CLUSTER_SPEC is not JSON: {error}; it begins with {text[:40]!r}") from error
    cluster, task = (spec.get("cluster"), spec.get("task")) if isinstance(spec, dict) else (None, None)
    if not isinstance(cluster, dict) or not isinstance(task, dict) or not isinstance(task.get("type"), str):
        raise TFConfigError(
            f"CLUSTER_SPEC is {text[:80]!r}; expected an object with cluster and task, as Vertex AI sets it"
        )
    return _Cluster(
        addresses={_pool_role(pool): _list(hosts, pool) for pool, hosts in cluster.items()},
        role=_pool_role(task["type"]),
        index=task.get("index", 0),
    )


def _pool_role(pool: str) -> str:
    return _POOLS.get(pool, pool)


def _list(value: Any, pool: str) -> list[str]:
    if not isinstance(value, list):
        raise TFConfigError(f'CLUSTER_SPEC has {pool} {json.dumps(value)[:80]}; expected a list such as ["host:2222"]')
    return value


def _by_rank(addresses: Sequence[str], rank: int, variable: str, tasks: Mapping[str, int]) -> _Cluster:
    """Give the roles to successive ranks, in the order of the settings."""
    if sum(tasks.values()) != len(addresses):
        shape = ", ".join(f"{role}={count}" for role, count in tasks.items())
        raise TFConfigError(f"--cluster-tasks is {shape}, which is not the {len(addresses)} tasks that were started")
    cluster: dict[str, Sequence[str]] = {}
    own: tuple[str, int] | None = None
    first = 0
    for name, count in tasks.items():
        role = _role(name, "--cluster-tasks")
        if role in cluster:
            raise TFConfigError(f"--cluster-tasks names {', '.join(tasks)}, two of which are one role")
        cluster[role] = addresses[first : first + count]
        if first <= rank < first + count:
            own = (role, rank - first)
        first += count
    if own is None:
        raise TFConfigError(f"{variable} is {rank}, but the cluster has {len(addresses)} tasks (from 0)")
    return _Cluster(addresses=cluster, role=own[0], index=own[1])


def _role(name: str, variable: str) -> str:
    if name == _NODE:
        return "worker"
    if name not in ("chief", "worker", "ps", "evaluator"):
        raise TFConfigError(f"{variable} names {name!r}; expected one of chief, worker, ps, evaluator, {_NODE}")
    return name


def _number(environ: Mapping[str, str], variable: str, origin: str) -> int:
    text = environ.get(variable, "")
    if not (text.isascii() and text.isdecimal()):
        state = f"is {text[:40]!r}" if text else "is missing"
        raise TFConfigError(f"{variable} {state}; expected a number from 0 up, {origin}")
    return int(text)


_SOURCES = (
    _Source(name="JobSet", variables=("JOBSET_NAME", "REPLICATED_JOB_NAME", "JOB_COMPLETION_INDEX"), read=_jobset),
    _Source(name="a TrainJob's plain runtime", variables=("HOSTNAME", "JOB_COMPLETION_INDEX"), read=_trainjob),
    _Source(
        name="Slurm",
        variables=("SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_PROCID"),
        read=_slurm,
    ),
    _Source(name="Vertex AI", variables=("CLUSTER_SPEC",), read=_vertex),
)
