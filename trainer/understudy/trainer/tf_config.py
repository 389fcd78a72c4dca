"""TF_CONFIG: the tasks of a cluster, and which of them this process is.

Three dialects are read: Keras' guide (``worker`` only), Kubeflow's TFJob (``chief`` or ``master``, ``ps``; an
``evaluator`` inside the cluster or, in older versions, only as the task) and Vertex AI (which adds keys of its own).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from understudy.trainer.trainer_errors import TFConfigError

Role = Literal["chief", "worker", "ps", "evaluator"]

_ROLES = get_args(Role)
_OLD_NAMES = {"master": "chief"}
_LARGEST_PORT = 65_535


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A training task, and its ``host:port``."""

    role: Role
    index: int
    address: str

    def __str__(self) -> str:
        return f"{self.role} {self.index} ({self.address})"


@dataclass(frozen=True, kw_only=True)
class ClusterTask:
    """This process's task, and its cluster.

    Attributes:
        role: The role; ``master`` becomes ``chief``.
        index: Index among the tasks of its role.
        cluster: Addresses by role, as in TF_CONFIG; ``master`` becomes ``chief``.
    """

    role: Role
    index: int
    cluster: Mapping[Role, tuple[str, ...]]

    @property
    def trainers(self) -> tuple[Peer, ...]:
        """The tasks that train synchronously: the chief, if there is one, then the workers."""
        return self._peers("chief", "worker")

    @property
    def servers(self) -> tuple[Peer, ...]:
        """The tasks that an asynchronous chief uses: the workers, and the parameter servers."""
        return self._peers("worker", "ps")

    def _peers(self, *roles: Role) -> tuple[Peer, ...]:
        return tuple(
            Peer(role=role, index=index, address=address)
            for role in roles
            for index, address in enumerate(self.cluster.get(role, ()))
        )

    @property
    def is_chief(self) -> bool:
        """Whether this task publishes: the chief or, in a cluster without one, worker 0."""
        return self.role == "chief" or (self.role == "worker" and self.index == 0 and not self.cluster.get("chief"))


def parse(environ: Mapping[str, str]) -> ClusterTask | None:
    """Read TF_CONFIG; return None if it is unset, empty, or describes no cluster.

    Raises:
        TFConfigError: It describes a cluster that this process cannot be a task of.
    """
    text = environ.get("TF_CONFIG", "").strip()
    if not text:
        return None
    config = _mapping(_decode(text), "TF_CONFIG")
    if not config.get("cluster"):
        return _outside_any_cluster(config)
    cluster = _parse_cluster(_mapping(config["cluster"], "cluster"))
    if "task" not in config:
        raise TFConfigError('task is missing; expected {"type": "worker", "index": 0} or the like')
    role, index = _parse_task(_mapping(config["task"], "task"))
    _check_membership(cluster, role, index)
    return ClusterTask(role=role, index=index, cluster=cluster)


def _decode(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise TFConfigError(f"TF_CONFIG is not JSON: {error}; it begins with {text[:40]!r}") from error


def _mapping(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TFConfigError(f"{name} is {json.dumps(value)[:80]}; expected a JSON object")
    return value


def _outside_any_cluster(config: Mapping[str, Any]) -> ClusterTask | None:
    """Return the task of a config without a cluster: a lone evaluator is one, any other task trains alone."""
    if not config.get("task"):
        return None
    role, index = _parse_task(_mapping(config["task"], "task"))
    if role == "evaluator":
        return ClusterTask(role=role, index=index, cluster={})
    if index != 0:
        raise TFConfigError(f"cluster is missing, although task.index is {index}")
    return None


def _parse_cluster(cluster: Mapping[str, Any]) -> dict[Role, tuple[str, ...]]:
    parsed: dict[Role, tuple[str, ...]] = {}
    for key, addresses in cluster.items():
        role = _parse_role(key, "cluster")
        if role in parsed:
            raise TFConfigError("cluster has both chief and master, which are two names for one task")
        parsed[role] = _parse_addresses(addresses, f"cluster.{key}")
    if len(parsed.get("chief", ())) > 1:
        raise TFConfigError(f"cluster.chief has {len(parsed['chief'])} addresses; a cluster has one chief")
    if not parsed.get("chief") and not parsed.get("worker"):
        raise TFConfigError(f"cluster.worker is missing; the cluster has only {', '.join(parsed)}")
    _check_distinct(parsed)
    return parsed


def _parse_role(value: Any, name: str) -> Role:
    role = _OLD_NAMES.get(value, value) if isinstance(value, str) else value
    if role not in _ROLES:
        raise TFConfigError(f"{name} names the type {value!r}; expected one of {', '.join((*_ROLES, *_OLD_NAMES))}")
    return cast("Role", role)


def _parse_addresses(value: Any, name: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise TFConfigError(f'{name} is {json.dumps(value)[:80]}; expected a list such as ["host:2222"]')
    for index, address in enumerate(value):
        host, separator, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
        if not (host and separator and port.isdecimal() and 0 < int(port) <= _LARGEST_PORT):
            raise TFConfigError(f"{name}[{index}] is {address!r}; expected host:port")
    return tuple(value)


def _check_distinct(cluster: Mapping[Role, tuple[str, ...]]) -> None:
    seen: dict[str, str] = {}
    for role, addresses in cluster.items():
        for index, address in enumerate(addresses):
            name = f"cluster.{role}[{index}]"
            if address in seen:
                raise TFConfigError(f"{name} is {address}, and so is {seen[address]}; every task has its own address")
            seen[address] = name


def _parse_task(task: Mapping[str, Any]) -> tuple[Role, int]:
    if "type" not in task:
        raise TFConfigError(f"task.type is missing; expected one of {', '.join((*_ROLES, *_OLD_NAMES))}")
    role = _parse_role(task["type"], "task.type")
    index = task.get("index", 0)
    if isinstance(index, str) and index.isdecimal():
        index = int(index)
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        raise TFConfigError(f"task.index is {index!r}; expected an integer from 0 up")
    return role, index


def _check_membership(cluster: Mapping[Role, tuple[str, ...]], role: Role, index: int) -> None:
    # Older versions of Kubeflow omit the evaluator from the cluster, which it never joins.
    if role == "evaluator" and role not in cluster:
        return
    if role not in cluster:
        raise TFConfigError(f"cluster.{role} is missing, although task.type is {role!r}; it has {', '.join(cluster)}")
    if index >= len(cluster[role]):
        raise TFConfigError(f"task.index is {index}, but cluster.{role} has {len(cluster[role])} addresses (from 0)")
