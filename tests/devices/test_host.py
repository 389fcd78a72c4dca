"""What a process may use of the machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from understudy.devices.host import available_memory_bytes, usable_cores, usable_memory_bytes

AFFINITY = len(os.sched_getaffinity(0))
MEBIBYTE = 2**20
MACHINE_MIB = 1000


def lay_out(folder: Path, process: str, files: Mapping[str, str]) -> dict[str, Path]:
    """Write the files of a machine, and return the arguments that name them."""
    paths = {"cgroups": folder / "cgroups", "process": folder / "process", "memory": folder / "memory"}
    folder.mkdir(exist_ok=True)
    paths["process"].write_text(process, encoding="ascii")
    memory = f"MemTotal: {2 * MACHINE_MIB * 1024} kB\nMemFree: 1 kB\nMemAvailable: {MACHINE_MIB * 1024} kB\n"
    paths["memory"].write_text(memory, encoding="ascii")
    for name, text in files.items():
        file = paths["cgroups"] / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="ascii")
    return paths


def cores(paths: Mapping[str, Path]) -> int:
    return usable_cores(cgroups=paths["cgroups"], process=paths["process"])


@pytest.mark.parametrize(
    ("process", "files", "expected"),
    [
        ("0::/\n", {}, AFFINITY),
        ("0::/\n", {"cpu.max": "max 100000\n"}, AFFINITY),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/pods/one\n", {"pods/cpu.max": "100000 100000", "pods/one/cpu.max": "max 100000"}, 1),
        (
            "4:cpu,cpuacct:/one\n0::/\n",
            {"cpu,cpuacct/one/cpu.cfs_quota_us": "50000", "cpu,cpuacct/one/cpu.cfs_period_us": "100000"},
            1,
        ),
        (
            "4:cpu:/\n",
            {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
            AFFINITY,
        ),
        ("0::/\n", {"cpu.max": f"{100000 * (AFFINITY + 7)} 100000"}, AFFINITY),
    ],
)
def test_cores_are_those_of_the_affinity_and_of_every_limit_around_the_process(
    tmp_path: Path, process: str, files: Mapping[str, str], expected: int
) -> None:
    assert cores(lay_out(tmp_path, process, files)) == expected


@pytest.mark.skipif(AFFINITY < 2, reason="needs two cores")
def test_a_part_of_a_core_counts_as_one(tmp_path: Path) -> None:
    assert cores(lay_out(tmp_path, "0::/\n", {"cpu.max": "110000 100000"})) == 2


def test_a_system_without_cgroups_has_the_cores_of_the_affinity(tmp_path: Path) -> None:
    assert usable_cores(cgroups=tmp_path / "none", process=tmp_path / "none") == AFFINITY


@pytest.mark.parametrize(
    ("process", "files", "expected_mib"),
    [
        ("0::/\n", {}, MACHINE_MIB),
        ("0::/\n", {"memory.max": "max", "memory.current": "1"}, MACHINE_MIB),
        ("0::/\n", {"memory.max": f"{300 * MEBIBYTE}", "memory.current": f"{100 * MEBIBYTE}"}, 200),
        (
            "0::/a\n",
            {
                "a/memory.max": f"{300 * MEBIBYTE}",
                "a/memory.current": f"{100 * MEBIBYTE}",
                "a/memory.stat": f"anon 5\ninactive_file {50 * MEBIBYTE}\n",
            },
            250,
        ),
        (
            "9:memory:/a\n",
            {
                "memory/a/memory.limit_in_bytes": f"{64 * MEBIBYTE}",
                "memory/a/memory.usage_in_bytes": f"{60 * MEBIBYTE}",
            },
            4,
        ),
        ("0::/\n", {"memory.max": "1", "memory.current": "5"}, 0),
    ],
)
def test_available_memory_is_what_the_machine_and_the_limits_leave(
    tmp_path: Path, process: str, files: Mapping[str, str], expected_mib: int
) -> None:
    paths = lay_out(tmp_path, process, files)
    assert available_memory_bytes(**paths) == expected_mib * MEBIBYTE


def test_usable_memory_is_the_least_of_the_machine_and_the_limits(tmp_path: Path) -> None:
    v1 = {"memory/a/memory.limit_in_bytes": f"{64 * MEBIBYTE}", "memory/a/memory.usage_in_bytes": f"{60 * MEBIBYTE}"}
    assert usable_memory_bytes(**lay_out(tmp_path / "limited", "9:memory:/a\n", v1)) == 64 * MEBIBYTE
    assert usable_memory_bytes(**lay_out(tmp_path / "free", "0::/\n", {})) == 2 * MACHINE_MIB * MEBIBYTE


def test_this_machine_has_memory_and_cores() -> None:
    assert 1 <= usable_cores() <= AFFINITY
    assert 0 < available_memory_bytes() <= usable_memory_bytes()
