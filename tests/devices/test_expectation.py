"""When GPUs are expected, and what is said when there are none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from understudy.devices.cuda_libraries import LIBRARIES, LibraryFault
from understudy.devices.diagnosis import device_files, expects_gpus, is_hidden, relevant, why_no_gpu

CUSOLVER = next(library for library in LIBRARIES if library.folder == "cusolver")
NCCL = next(library for library in LIBRARIES if library.folder == "nccl")

GIVEN = {"NVIDIA_VISIBLE_DEVICES": "all"}


@pytest.mark.parametrize(
    ("wanted", "logical_cpus", "environ", "files", "reason"),
    [
        ((), None, {}, [], None),
        (("GPU",), None, {}, [], "--devices asks for GPU"),
        (("CPU:0", "GPU:1"), None, {"CUDA_VISIBLE_DEVICES": "-1"}, [], "--devices asks for GPU:1"),
        ((), None, GIVEN, [], "NVIDIA_VISIBLE_DEVICES is 'all'"),
        ((), None, {"NVIDIA_VISIBLE_DEVICES": "MIG-1"}, [], "NVIDIA_VISIBLE_DEVICES is 'MIG-1'"),
        ((), None, {"NVIDIA_VISIBLE_DEVICES": "void"}, [], None),
        ((), None, {"NVIDIA_VISIBLE_DEVICES": "none"}, [], None),
        ((), None, {}, ["/dev/nvidia0"], "/dev/nvidia0 is there"),
        ((), None, {**GIVEN, "CUDA_VISIBLE_DEVICES": ""}, ["/dev/nvidia0"], None),
        ((), None, {**GIVEN, "CUDA_VISIBLE_DEVICES": "-1"}, ["/dev/nvidia0"], None),
        (("CPU:0",), None, GIVEN, ["/dev/nvidia0"], None),
        ((), 2, GIVEN, ["/dev/nvidia0"], None),
    ],
)
def test_gpus_are_expected_where_they_are_asked_for_or_present(
    wanted: tuple[str, ...], logical_cpus: int | None, environ: Mapping[str, str], files: list[str], reason: str | None
) -> None:
    assert expects_gpus(wanted=wanted, logical_cpus=logical_cpus, environ=environ, files=files) == reason


@pytest.mark.parametrize(
    ("visible", "hidden"), [("", True), ("-1", True), ("-1,0", True), ("0", False), ("1,0", False), ("GPU-5f", False)]
)
def test_cuda_visible_devices_hides_all_or_not(visible: str, hidden: bool) -> None:  # noqa: FBT001 - a table's column
    assert is_hidden({"CUDA_VISIBLE_DEVICES": visible}) is hidden


def test_device_files_are_those_of_gpus(tmp_path: Path) -> None:
    for name in ("nvidia1", "nvidia0", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()

    assert device_files(tmp_path) == [str(tmp_path / "nvidia0"), str(tmp_path / "nvidia1")]


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"environ": {"CUDA_VISIBLE_DEVICES": "-1"}}, ["CUDA_VISIBLE_DEVICES is '-1'", "unset it"]),
        ({"is_cuda_build": False}, ["built without CUDA", "pip install 'tensorflow[and-cuda]'"]),
        ({"driver_fault": "cuInit failed with CUDA_ERROR_NO_DEVICE"}, ["CUDA_ERROR_NO_DEVICE", "--gpus all"]),
        (
            {"faults": [LibraryFault(library=CUSOLVER, reason="no such file")]},
            ["libcusolver.so.11 (no such file)", "nvidia-cusolver-cu12"],
        ),
        (
            {"faults": [LibraryFault(library=NCCL, reason="gone")], "warnings": "CUDA says no"},
            ["TensorFlow says: CUDA says no"],
        ),
        ({}, ["TensorFlow does not say why"]),
    ],
)
def test_the_reason_and_the_remedy_are_named(facts: dict[str, object], words: list[str]) -> None:
    usual: dict[str, object] = {
        "environ": {},
        "is_cuda_build": True,
        "driver_fault": None,
        "faults": [],
        "warnings": "",
    }

    text = why_no_gpu("/dev/nvidia0 is there", **{**usual, **facts})  # type: ignore[arg-type] # the table's

    assert text.startswith("/dev/nvidia0 is there, but TensorFlow finds no GPU: ")
    assert all(word in text for word in words)
    assert text.endswith("say so with --devices CPU:0")


def test_of_tensorflow_s_log_the_lines_about_gpus_are_kept() -> None:
    log = (
        "I0000 00:00:1795342783.418911   11138 port.cc:153] oneDNN custom operations are on.\n"
        "W0000 00:00:1795342783.419310   11138 gpu_device.cc:2342] Cannot dlopen some GPU libraries.\n"
        "Skipping registering GPU devices...\n"
        "W0000 00:00:1795342783.419310   11138 gpu_device.cc:2342] Cannot dlopen some GPU libraries.\n"
    )

    assert relevant(log) == (
        "gpu_device.cc:2342] Cannot dlopen some GPU libraries. | Skipping registering GPU devices..."
    )
