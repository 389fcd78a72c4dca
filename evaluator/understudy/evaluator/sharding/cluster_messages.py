"""What `understudy.evaluator.sharding.cluster_pool` and its process tell each other besides the events of a pool."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

MODE_VARIABLE: Final = "RAY_AUTH_MODE"
"""The environment variable that has Ray ask for a token."""


@dataclass(frozen=True, kw_only=True)
class ClusterRequest:
    """What the process is told first.

    Attributes:
        work: A pickled `understudy.evaluator.sharding.work.Work`, which needs TensorFlow to be read.
        folder: The folder of the checkpoint.
        address: The address of the cluster.
        workers: The most nodes to use; None for all.
    """

    work: bytes
    folder: Path
    address: str
    workers: int | None


@dataclass(frozen=True)
class Nodes:
    """How many workers there may be now."""

    capacity: int
