"""The image and the manifests: what a service with GPUs needs of them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from understudy.cli.main import main

ROOT = Path(__file__).parent.parent
KUBERNETES = ROOT / "deploy" / "kubernetes"
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")

MANIFESTS = sorted(file.name for file in KUBERNETES.glob("*.yaml"))
LONGEST_FIRST_START_SECONDS = 900
"""A GPU that is newer than TensorFlow's kernels compiles them, which takes minutes."""


def environment_of_the_image() -> dict[str, str]:
    (block,) = re.findall(r"^ENV ((?:.*\\\n)*.*)$", DOCKERFILE, re.MULTILINE)
    return dict(word.partition("=")[::2] for word in shlex.split(block.replace("\\\n", " ")))


def pods(name: str) -> list[dict[str, Any]]:
    """Return the pod specs of a manifest."""
    found = []
    for document in yaml.safe_load_all((KUBERNETES / name).read_text(encoding="utf-8")):
        spec = document["spec"]
        if "tfReplicaSpecs" in spec:
            found += [role["template"]["spec"] for role in spec["tfReplicaSpecs"].values()]
        elif "template" in spec:
            found.append(spec["template"]["spec"])
    return found


def accepts(arguments: list[str]) -> bool:
    """Return whether the command line can be parsed."""
    command = main.get_command(click.Context(main), arguments[0])
    assert command is not None
    command.make_context(arguments[0], list(arguments[1:]))
    return True


def test_the_health_check_asks_where_the_service_says_that_it_listens() -> None:
    (check,) = re.findall(r"^HEALTHCHECK .*\\\n\s+CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)

    assert json.loads(check) == ["understudy", "health"]
    assert environment_of_the_image()["UNDERSTUDY_ADDRESS_FILE"].startswith("/dev/shm/")  # noqa: S108 - the image's


def test_the_image_asks_for_the_driver_s_parts_and_keeps_compiled_kernels_where_it_can_write() -> None:
    environment = environment_of_the_image()
    (volume,) = re.findall(r"^VOLUME (\S+)$", DOCKERFILE, re.MULTILINE)

    assert environment["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"
    assert environment["CUDA_CACHE_PATH"].startswith(f"{volume}/")
    assert int(environment["CUDA_CACHE_MAXSIZE"]) >= 2**30
    assert "NVIDIA_VISIBLE_DEVICES" not in environment  # it would make the service expect GPUs everywhere


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_s_command_can_be_parsed_and_its_volumes_are_there(name: str) -> None:
    for pod in pods(name):
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert accepts(container["args"])
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_says_whether_other_machines_are_served_without_tls(name: str) -> None:
    assert environment_of_the_image()["UNDERSTUDY_HOST"] == "0.0.0.0"  # noqa: S104 - the container's
    assert not environment_of_the_image().keys() & {"UNDERSTUDY_INSECURE", "UNDERSTUDY_TLS_CERT"}
    for pod in pods(name):
        for container in pod["containers"]:
            variables = {variable["name"]: variable.get("value") for variable in container.get("env", ())}
            assert variables.get("UNDERSTUDY_INSECURE") == "true" or {"--insecure", "--tls-cert"} & {*container["args"]}


@pytest.mark.parametrize("name", [name for name in MANIFESTS if name.startswith("evaluator")])
def test_an_evaluator_is_given_the_time_that_a_first_start_takes(name: str) -> None:
    (pod,) = pods(name)
    probe = pod["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= LONGEST_FIRST_START_SECONDS


def test_the_evaluator_for_gpus_has_gpus_shared_memory_and_a_cache_that_lasts() -> None:
    (pod,) = pods("evaluator-gpu.yaml")
    (container,) = pod["containers"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    cache = {variable["name"]: variable["value"] for variable in container["env"]}["CUDA_CACHE_PATH"]

    assert container["resources"]["limits"]["nvidia.com/gpu"] > 1
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"  # noqa: S108 - the container's
    assert "persistentVolumeClaim" in volumes[mounts[str(Path(cache).parent)]]
