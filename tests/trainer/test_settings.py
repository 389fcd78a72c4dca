from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from understudy.trainer import TrainSettings


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 0}, "^steps is at least 1, not 0"),
        ({"checkpoint_every": 0}, "^checkpoint_every is at least 1"),
        ({"keep_checkpoints": 0}, "^keep_checkpoints is at least 1"),
        ({"steps_per_call": -1}, "^steps_per_call is at least 1"),
        ({"logical_cpus": 0, "strategy": "mirrored"}, "^logical_cpus is at least 1"),
        ({"global_batch_size": 0}, "^global_batch_size is at least 1"),
        ({"shuffle_buffer": 0}, "^shuffle_buffer is at least 1"),
        ({"seed": -1}, "^seed is -1; expected 0 to 4294967295"),
        ({"seed": 2**32}, "^seed is 4294967296; expected"),
        ({"metrics_port": 65536}, "^metrics_port is 65536; expected 1 to 65535"),
        ({"cluster_timeout_seconds": 0.0}, "^cluster_timeout_seconds is a positive time"),
        ({"cross_device_ops": "nccl"}, "^cross_device_ops is for the mirrored strategy"),
        ({"communication": "ring"}, "^communication is for the multi_worker strategy"),
        ({"strategy": "multi_worker", "logical_cpus": 2}, "^logical_cpus is for one machine"),
        ({"tpu": "mine"}, "^tpu is for the tpu strategy"),
        ({"strategy": "tpu", "logical_cpus": 2}, "^strategy tpu finds its devices itself"),
        ({"strategy": "parameter_server", "devices": ("GPU:0",)}, "^strategy parameter_server finds its devices"),
        ({"devices": ("GPU:0", "GPU:1")}, "^devices names 2 devices"),
        ({"logical_cpus": 2}, "^logical_cpus makes replicas"),
        ({"strategy": "mirrored", "devices": ("GPU:0",), "logical_cpus": 2}, "^devices and logical_cpus exclude"),
    ],
)
def test_an_error_begins_with_the_field_at_fault(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainSettings(**{"run_dir": Path("run"), "steps": 1, **values})
