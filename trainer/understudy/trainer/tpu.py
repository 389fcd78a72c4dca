"""TPUStrategy, by name or local."""

from __future__ import annotations

import os
import subprocess
import sys

import tensorflow as tf

from understudy.trainer.trainer_errors import StrategyError

_PROBE = (
    "import sys, tensorflow as tf; "
    "resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=sys.argv[1]); "
    "tf.config.experimental_connect_to_cluster(resolver); "
    "tf.tpu.experimental.initialize_tpu_system(resolver)"
)


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
