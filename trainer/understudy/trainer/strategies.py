"""Builds the distribution strategy that the settings name."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from understudy.trainer import devices
from understudy.trainer.joining import ended_after, join, join_seconds
from understudy.trainer.rendezvous import wait_for_peers
from understudy.trainer.settings import CrossDeviceOpsName, TrainSettings
from understudy.trainer.tf_config import ClusterTask, parse
from understudy.trainer.trainer_errors import StrategyError, TFConfigError

_PROBE = (
    "import sys, tensorflow as tf; "
    "resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=sys.argv[1]); "
    "tf.config.experimental_connect_to_cluster(resolver); "
    "tf.tpu.experimental.initialize_tpu_system(resolver)"
)


def training_task(settings: TrainSettings, environ: Mapping[str, str]) -> ClusterTask | None:
    """Return this process's task in the cluster that TF_CONFIG describes; None for single-machine strategies.

    Raises:
        TFConfigError: The strategy needs a cluster, and TF_CONFIG does not make this process a training task.
    """
    if settings.strategy not in ("multi_worker", "parameter_server"):
        return None
    task = parse(environ)
    if task is None:
        raise TFConfigError(
            f"TF_CONFIG is unset or has no cluster; the {settings.strategy} strategy needs it in every task"
        )
    if settings.strategy == "parameter_server":
        _check_asynchronous(task)
    elif task.role not in ("chief", "worker"):
        raise TFConfigError(f"task.type is {task.role!r}; under the multi_worker strategy the chief and workers train")
    return task


def _check_asynchronous(task: ClusterTask) -> None:
    for role in ("chief", "worker", "ps"):
        if not task.cluster.get(role):
            raise TFConfigError(f"cluster.{role} is missing; the parameter_server strategy needs chief, worker and ps")
    if task.role == "evaluator":
        raise TFConfigError("task.type is 'evaluator', which does not train; use `understudy run` or `serve`")


def build_strategy(
    settings: TrainSettings, task: ClusterTask | None, *, while_waiting: Callable[[], None] = lambda: None
) -> tf.distribute.Strategy:
    """Return the strategy that the settings name; in a cluster, wait for the other tasks.

    Args:
        settings: Name the strategy.
        task: This process's task, under a strategy that needs a cluster.
        while_waiting: Called periodically while waiting for the other tasks; may raise to end the wait.

    Raises:
        StrategyError: This machine lacks the devices.
        ClusterTimeoutError: The cluster did not form in time.
        ClusterError: This task cannot take part in the cluster.
    """
    names = devices.configure(settings)
    if task is not None and settings.strategy == "parameter_server":
        return _parameter_server(settings, task, while_waiting)
    if task is not None:
        return _multi_worker(settings, task, while_waiting)
    if settings.strategy == "mirrored":
        return _mirrored(settings, names)
    if settings.strategy == "tpu":
        return build_tpu_strategy(settings.tpu, timeout_seconds=settings.cluster_timeout_seconds)
    if settings.devices or names[0].startswith("GPU"):
        return tf.distribute.OneDeviceStrategy(names[0])  # copies each batch to the device before its step
    return tf.distribute.get_strategy()


def _mirrored(settings: TrainSettings, names: Sequence[str]) -> tf.distribute.Strategy:
    if settings.cross_device_ops == "nccl" and not any(name.startswith("GPU") for name in names):
        raise StrategyError(
            "cross_device_ops is nccl, which needs GPUs, and the replicas are on CPUs; choose auto, hierarchical_copy "
            "or reduction_to_one_device",
        )
    chosen = bool(settings.devices) or settings.logical_cpus is not None
    return tf.distribute.MirroredStrategy(
        list(names) if chosen else None, cross_device_ops=_cross_device_ops(settings.cross_device_ops)
    )


def _cross_device_ops(name: CrossDeviceOpsName) -> tf.distribute.CrossDeviceOps | None:
    if name == "auto":
        return None
    operations = {
        "nccl": tf.distribute.NcclAllReduce,
        "hierarchical_copy": tf.distribute.HierarchicalCopyAllReduce,
        "reduction_to_one_device": tf.distribute.ReductionToOneDevice,
    }
    return operations[name]()


def _multi_worker(
    settings: TrainSettings, task: ClusterTask, while_waiting: Callable[[], None]
) -> tf.distribute.Strategy:
    wait_for_peers(task, timeout_seconds=settings.cluster_timeout_seconds, while_waiting=while_waiting)
    while_waiting()
    implementation = tf.distribute.experimental.CommunicationImplementation[settings.communication.upper()]
    options = tf.distribute.experimental.CommunicationOptions(implementation=implementation)
    return join(
        task,
        lambda resolver: tf.distribute.MultiWorkerMirroredStrategy(
            cluster_resolver=resolver, communication_options=options
        ),
        seconds=join_seconds(settings),
    )


def _parameter_server(
    settings: TrainSettings, task: ClusterTask, while_waiting: Callable[[], None]
) -> tf.distribute.Strategy:
    wait_for_peers(
        task, timeout_seconds=settings.cluster_timeout_seconds, peers=task.servers, while_waiting=while_waiting
    )
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({role: list(task.cluster[role]) for role in ("chief", "worker", "ps")}),
        task_type=task.role,
        task_id=task.index,
        rpc_layer="grpc",
    )
    with ended_after(join_seconds(settings)):
        return tf.distribute.ParameterServerStrategy(resolver)


def build_tpu_strategy(name: str, *, timeout_seconds: float) -> tf.distribute.Strategy:
    """Return the strategy of a TPU.

    The search for a TPU may block indefinitely, and Python cannot interrupt it; so a separate process tries first.

    Args:
        name: The TPU's name or address, or ``local``.
        timeout_seconds: How long to look for it.

    Raises:
        StrategyError: It was not found, or not in time.
    """
    _probe(name, timeout_seconds)
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=name)
    tf.config.experimental_connect_to_cluster(resolver)
    tf.tpu.experimental.initialize_tpu_system(resolver)
    return tf.distribute.TPUStrategy(resolver)


def _probe(name: str, timeout_seconds: float) -> None:
    try:
        ended = subprocess.run(
            [sys.executable, "-c", _PROBE, name],
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise StrategyError(f"no TPU {name!r} was found within {timeout_seconds:g} s; check --tpu") from None
    if ended.returncode != 0:
        raise StrategyError(f"there is no TPU {name!r}: {_last_line(ended.stderr)}; check --tpu, or choose mirrored")


def _last_line(text: str) -> str:
    """Return the line of a traceback that says what happened."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    raised = [line for line in lines if line.partition(":")[0].endswith("Error")]
    return (raised or lines or ["no reason given"])[-1]
