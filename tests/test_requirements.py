"""The lists of packages with hashes, and the tools that keep and check them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
import urllib.request
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
LISTS = sorted((ROOT / "requirements").glob("*.txt"))
PINNED = re.compile(r"([A-Za-z0-9_.-]+)(?:\[[a-z0-9-]+\])?==(\S+)(?: ; [^\\]+)? \\")
HASH = re.compile(r"    --hash=sha256:[0-9a-f]{64}(?: \\)?")


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned(file: Path) -> dict[str, set[str]]:
    """Return the versions of each package of a list; every other line must be a hash."""
    found: dict[str, set[str]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        package = PINNED.fullmatch(line)
        assert package or HASH.fullmatch(line), f"{file.name}: {line}"
        if package:
            found.setdefault(normalized(package[1]), set()).add(package[2])
    return found


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = (re.match(r"([A-Za-z0-9_.-]+)==([^\s;]+)", line) for line in lines)
    return {normalized(match[1]): match[2] for match in found if match}


@pytest.mark.parametrize("file", LISTS, ids=lambda file: file.stem)
def test_every_package_has_hashes_and_the_version_of_the_constraints(file: Path) -> None:
    versions = constraints()
    packages = pinned(file)
    assert packages
    for name, found in packages.items():
        assert found == {versions.get(name, *found)}, f"run `make lock`: {name}"


def test_the_lists_hold_what_pyproject_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]

    def names(requirements: list[str]) -> set[str]:
        found = {normalized(re.split(r"[^A-Za-z0-9_.-]", requirement)[0]) for requirement in requirements}
        return found - {"understudy"}

    wanted = {
        "development": [
            *extras["server"],
            *extras["server-base"],
            *extras["fast"],
            *extras["otel"],
            *extras["examples"],
            *extras["dev"],
        ],
        "image-cpu": [
            *extras["server-base"],
            *extras["otel"],
            *extras["examples"],
            "tensorflow-cpu",
            "tensorflow-serving-api",
        ],
        "image-cuda": [*extras["server"], *extras["server-base"], *extras["otel"], *extras["examples"]],
        "docs": extras["docs"],
        "build": project["build-system"]["requires"],
    }
    for name, requirements in wanted.items():
        missing = names(requirements) - pinned(ROOT / "requirements" / f"{name}.txt").keys()
        assert not missing, f"run `make lock`: {name} lacks {missing}"


@pytest.mark.parametrize(("machine", "build"), [("x86_64", "tensorflow-cpu"), ("aarch64", "tensorflow")])
def test_the_image_for_cpus_has_one_build_of_tensorflow_on_every_machine(machine: str, build: str) -> None:
    lines = (ROOT / "requirements" / "image-cpu.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line.removesuffix(" \\")) for line in lines if line.startswith("tensorflow")]
    installed = [pin.name for pin in pins if pin.marker is None or pin.marker.evaluate({"platform_machine": machine})]
    assert [name for name in installed if name != "tensorflow-serving-api"] == [build]


def test_the_base_of_the_image_is_pinned_to_the_digest_of_its_tag(tmp_path: Path) -> None:
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text((ROOT / "Dockerfile").read_text(encoding="utf-8"), encoding="utf-8")
    docker = tmp_path / "docker"
    docker.write_text(f"#!/bin/sh\necho {'sha256:' + 'ab' * 32}\n")
    docker.chmod(0o755)
    command = [str(ROOT / "tools" / "pin_base.sh"), "", str(dockerfile)]
    for _ in range(2):  # A base that is pinned is pinned again.
        environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        subprocess.run(command, check=True, env=environ, timeout=30, capture_output=True)
    pins = re.findall(r"^ARG BASE=(.*)$", dockerfile.read_text(encoding="utf-8"), re.MULTILINE)
    assert pins == ["python:3.11-slim@sha256:" + "ab" * 32]


@pytest.fixture
def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", ROOT / "tools" / "audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["audit"] = module
    spec.loader.exec_module(module)
    return module


def test_the_audit_says_that_nothing_could_be_checked(audit: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    skipped = {"a": {"name": "a", "skip_reason": "not found"}}
    assert audit.report(skipped, "", strict=False) == 0
    assert audit.NOTHING_FOUND in capsys.readouterr().out
    assert audit.report({}, "no network", strict=False) == 0
    assert f"{audit.NOTHING_FOUND}: no network" in capsys.readouterr().out
    assert audit.report(skipped, "", strict=True) == 1


def test_the_audit_fails_for_a_known_vulnerability(audit: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    found = {"a 1": {"name": "a", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2"]}]}, "b 1": {"vulns": []}}
    assert audit.report(found, "", strict=False) == 1
    assert "a 1: PYSEC-1, fixed in 2" in capsys.readouterr().out


def test_an_export_of_osv_is_asked_as_osv_is(audit: ModuleType, tmp_path: Path) -> None:
    def advisory(name: str, package: str, **more: Any) -> dict[str, Any]:
        affected = [{"package": {"name": package, "ecosystem": "PyPI"}, "versions": ["1.0", "1.1"]}]
        return {"id": name, "affected": affected, **more}

    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("A.json", json.dumps(advisory("A", "Some_Package")))
        archive.writestr("B.json", json.dumps(advisory("B", "other")))
        archive.writestr("C.json", json.dumps(advisory("C", "some.package", withdrawn="2026-01-01T00:00:00Z")))
    with audit.served(audit.read_advisories(tmp_path / "all.zip")) as url:

        def ask(package: str, version: str) -> list[str]:
            body = json.dumps({"package": {"name": package, "ecosystem": "PyPI"}, "version": version}).encode()
            with urllib.request.urlopen(urllib.request.Request(url, body), timeout=30) as answer:  # noqa: S310
                return [found["id"] for found in json.load(answer).get("vulns", [])]

        assert ask("some-package", "1.1") == ["A"]
        assert ask("some-package", "1.2") == []
        assert ask("unknown", "1.0") == []
