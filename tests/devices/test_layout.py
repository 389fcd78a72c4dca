"""What is decided about this machine's devices, and how commands end where GPUs are missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from understudy.cli.main import main
from understudy.devices import layout
from understudy.devices.errors import DeviceLayoutError, DevicesFixedError, NoGpuError


def test_the_cpus_that_there_are_are_planned_and_described(logical_cpus: tuple[str, ...]) -> None:
    planned = layout.plan(logical_cpus[1:3])
    layout.apply(planned)

    first, second = layout.describe(planned)
    assert (first["device"], second["device"]) == logical_cpus[1:3]
    assert first["kind"] == "CPU"
    assert first["memory_mib"] > 100


def test_devices_cannot_be_laid_out_otherwise_once_tensorflow_runs(logical_cpus: tuple[str, ...]) -> None:
    import tensorflow as tf

    assert len(tf.config.list_logical_devices("CPU")) == len(logical_cpus)
    with pytest.raises(DevicesFixedError, match="already running with other devices"):
        layout.apply(layout.plan((), len(logical_cpus) - 1))


@pytest.mark.usefixtures("logical_cpus")
def test_a_gpu_that_is_asked_for_and_hidden_is_explained() -> None:
    with pytest.raises(NoGpuError, match=r"asks for GPU:1, but .* CUDA_VISIBLE_DEVICES is '-1', which hides"):
        layout.plan(["gpu:1"])


@pytest.mark.usefixtures("logical_cpus")
def test_someone_who_names_several_mig_instances_hears_that_cuda_gives_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1,MIG-2")
    with pytest.raises(DeviceLayoutError, match="CUDA gives a process one MIG instance"):
        layout.plan(["CPU:99"])


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["serve", "--checkpoints", "RUN", "--grpc-port", "0", "--http-port", "0", "--devices", "GPU"], "asks for GPU"),
        (["train", "digits", "--run-dir", "RUN", "--steps", "1"], "NVIDIA_VISIBLE_DEVICES is 'all'"),
    ],
    ids=["serve", "train"],
)
def test_a_command_that_should_have_gpus_and_finds_none_ends_with_the_reason(
    command: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if Path("/dev/nvidia0").exists():
        pytest.skip("this machine has a GPU")
    (tmp_path / "RUN").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")

    ended = CliRunner(env={"NVIDIA_VISIBLE_DEVICES": "all", "XDG_STATE_HOME": str(tmp_path)}).invoke(main, command)

    assert ended.exit_code == 1, ended.output
    line = ended.stderr.splitlines()[-1]
    assert f"{reason}, but TensorFlow finds no GPU: " in line
    assert "libcuda.so.1" in line or "built without CUDA" in line
    assert "--devices CPU:0" in line
