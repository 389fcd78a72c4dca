"""Malicious archives: ``.keras`` files that expand, lead out, or are not what their directory says."""

from __future__ import annotations

import stat
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from soak.malicious.harms import HARMS, Harm, harm, write_honest
from understudy.checkpoints.kinds import ModelKind


def honest_members(folder: Path) -> dict[str, bytes]:
    """Return the members of the archive of an honest model, by their names."""
    write_honest(folder / "model.keras")
    with zipfile.ZipFile(folder / "model.keras") as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def _archive(name: str, refusal: str) -> Callable[[Callable[[zipfile.ZipFile], None]], Any]:
    """Register what is added to the archive of an honest model."""

    def register(add: Callable[[zipfile.ZipFile], None]) -> Any:
        def write(folder: Path, marker: Path) -> None:
            del marker
            members = honest_members(folder)
            with zipfile.ZipFile(folder / "model.keras", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
                for member, content in members.items():
                    archive.writestr(member, content)
                add(archive)

        HARMS[name] = Harm(ModelKind.KERAS, refusal, write)
        return add

    return register


@_archive("an archive that expands to 300 MiB", "would expand")
def _(archive: zipfile.ZipFile) -> None:
    with archive.open("assets/zeros", "w") as member:
        for _ in range(300):
            member.write(bytes(2**20))


@_archive("a name that leads out", "leads out")
def _(archive: zipfile.ZipFile) -> None:
    archive.writestr("../outside", "x")


@_archive("an absolute name", "leads out")
def _(archive: zipfile.ZipFile) -> None:
    archive.writestr("/tmp/outside", "x")  # noqa: S108 - never written


@_archive("a symbolic link", "symbolic link")
def _(archive: zipfile.ZipFile) -> None:
    link = zipfile.ZipInfo("assets/link")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    archive.writestr(link, "/etc/passwd")


@_archive("the weights twice", "twice")
def _(archive: zipfile.ZipFile) -> None:
    with warnings.catch_warnings(action="ignore"):  # that it is there already
        archive.writestr("model.weights.h5", "x")


@_archive("20,000 files", "at most 10000")
def _(archive: zipfile.ZipFile) -> None:
    for number in range(20_000):
        archive.writestr(f"assets/{number}", "")


def _keras_of(name: str, refusal: str) -> Callable[[Callable[[dict[str, bytes]], None]], Any]:
    """Register a change of the members of an honest archive."""

    def register(change: Callable[[dict[str, bytes]], None]) -> Any:
        def write(folder: Path, marker: Path) -> None:
            del marker
            members = honest_members(folder)
            change(members)
            with zipfile.ZipFile(folder / "model.keras", "w", zipfile.ZIP_DEFLATED) as archive:
                for member, content in members.items():
                    archive.writestr(member, content)

        HARMS[name] = Harm(ModelKind.KERAS, refusal, write)
        return change

    return register


@_keras_of("a config.json of 64 MiB", "config.json has")
def _(members: dict[str, bytes]) -> None:
    members["config.json"] = b"[" + b" " * 2**26 + b"]"


@_keras_of("a config.json of millions of lists", "values")
def _(members: dict[str, bytes]) -> None:
    members["config.json"] = b"[" + b"[]," * 2_500_000 + b"[]]"


@_keras_of("a config.json nested without end", "maximum recursion|nested")
def _(members: dict[str, bytes]) -> None:
    members["config.json"] = b"[" * 100_000 + b"]" * 100_000


@harm("files that overlap in the archive", ModelKind.KERAS, "overlap")
def _(folder: Path, marker: Path) -> None:
    del marker
    write_honest(folder / "model.keras")
    content = bytearray((folder / "model.keras").read_bytes())
    with zipfile.ZipFile(folder / "model.keras") as archive:
        weights = archive.getinfo("model.weights.h5")
        directory = archive.start_dir
    entry = content.index(b"config.json", directory) - 46
    struct.pack_into("<L", content, entry + 42, weights.header_offset + 40)
    (folder / "model.keras").write_bytes(content)


@harm("an encrypted file in the archive", ModelKind.KERAS, "encrypted")
def _(folder: Path, marker: Path) -> None:
    del marker
    write_honest(folder / "model.keras")
    content = bytearray((folder / "model.keras").read_bytes())
    with zipfile.ZipFile(folder / "model.keras") as archive:
        directory = archive.start_dir
    content[content.index(b"config.json", directory) - 46 + 8] |= 1
    (folder / "model.keras").write_bytes(content)


@harm("a size that is not the real one", ModelKind.KERAS, "CRC|bytes, its directory|Error")
def _(folder: Path, marker: Path) -> None:
    del marker
    members = {**honest_members(folder), "config.json": b" " * 2**22 + b"{}"}
    with zipfile.ZipFile(folder / "model.keras", "w", zipfile.ZIP_DEFLATED) as archive:
        for member, text in members.items():
            archive.writestr(member, text)
    content = bytearray((folder / "model.keras").read_bytes())
    with zipfile.ZipFile(folder / "model.keras") as archive:
        directory = archive.start_dir
    struct.pack_into("<L", content, content.index(b"config.json", directory) - 46 + 24, 100)
    (folder / "model.keras").write_bytes(content)
