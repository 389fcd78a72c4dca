from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from understudy.evaluator.records.ledger_file import is_remote, mounted_type, type_among


class Mounted(NamedTuple):
    mountpoint: str
    fstype: str


MOUNTS = [
    Mounted("/", "overlay"),
    Mounted("/data", "ext4"),
    Mounted("/data/runs", "nfs4"),
    Mounted("/home", "autofs"),
    Mounted("/home", "nfs"),
]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/etc", "overlay"),
        ("/data/runs", "nfs4"),
        ("/data/runs/1/evaluator", "nfs4"),
        ("/data/runs2", "ext4"),
        ("/home/ada", "nfs"),
    ],
)
def test_the_innermost_mount_holds_a_path_and_a_later_mount_hides_an_earlier_one(path: str, expected: str) -> None:
    assert type_among(Path(path), MOUNTS) == expected


def test_without_a_mount_the_type_is_unknown_and_counts_as_local() -> None:
    assert type_among(Path("/etc"), []) == ""
    assert not is_remote("")


def test_the_file_systems_of_this_machine_are_found() -> None:
    assert mounted_type(Path("/proc/self")) == "proc"


@pytest.mark.parametrize("file_system", ["nfs", "nfs4", "cifs", "ceph", "lustre", "fuse.sshfs", "9p"])
def test_network_file_systems_are_remote(file_system: str) -> None:
    assert is_remote(file_system)


@pytest.mark.parametrize("file_system", ["ext4", "xfs", "btrfs", "overlay", "tmpfs", "zfs", "fuseblk", "apfs"])
def test_local_file_systems_are_not(file_system: str) -> None:
    assert not is_remote(file_system)
