"""The manifests of a Ray cluster beside the evaluator, against Kubernetes' schemas, the program, Ray and the image."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import kubernetes_validate
import pytest

from testkit.manifests import ROOT, Document, Pod, by_kind, chart, cluster_pods, overlay, pods

KUBERNETES_VERSION = "1.37"
WITH_CHART: dict[str, Any] = {"cluster": {"enabled": True, "workers": 3}, "run": {"claim": "runs"}}
FIELDS = {
    "": {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"},
    "authOptions": {"mode", "secretName"},
    "headGroupSpec": {"rayStartParams", "template"},
    "workerGroupSpecs": {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"},
}
"""The fields of KubeRay 1.6 that are used; it publishes no types for Python or JavaScript that could check them."""

every_rendering = pytest.mark.parametrize("name", ["overlay", "chart"])


def documents_of(name: str) -> list[Document]:
    return overlay("evaluator-cluster") if name == "overlay" else chart(WITH_CHART)


def cluster_of(name: str) -> Document:
    (cluster,) = by_kind(documents_of(name), "RayCluster")
    return cluster


def evaluator_of(name: str) -> Pod:
    (evaluator,) = pods(documents_of(name))
    return evaluator


def start_options(command: list[str]) -> dict[str, Any]:
    """Return the options of a ``ray start``, as Ray itself reads them."""
    scripts = pytest.importorskip("ray.scripts.scripts", reason="this environment is without the extra [ray]")
    options: dict[str, Any] = scripts.start.make_context("start", command).params
    return options


def options_of(group: Document) -> dict[str, Any]:
    """Return the options that KubeRay gives ``ray start``."""
    return start_options([f"--{name}={value}" for name, value in group["rayStartParams"].items()])


@every_rendering
def test_the_pods_are_valid_and_have_no_rights_that_they_do_not_need(name: str) -> None:
    for pod in cluster_pods(cluster_of(name)):
        alone = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": pod.spec}
        kubernetes_validate.validate(alone, KUBERNETES_VERSION, strict=True)
    containers = [pod.container for pod in cluster_pods(cluster_of(name))]
    for spec in [*(pod.spec for pod in cluster_pods(cluster_of(name))), evaluator_of(name).spec]:
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["automountServiceAccountToken"] is False
    for container in [*containers, *evaluator_of(name).spec["initContainers"]]:
        assert container["securityContext"] == {
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "memory" in container["resources"]["limits"]


@every_rendering
def test_the_cluster_has_the_fields_that_kuberay_knows(name: str) -> None:
    cluster = cluster_of(name)
    assert cluster["apiVersion"] == "ray.io/v1"
    spec = cluster["spec"]
    assert spec.keys() == FIELDS[""]
    for field in ("authOptions", "headGroupSpec"):
        assert spec[field].keys() == FIELDS[field]
    for group in spec["workerGroupSpecs"]:
        assert group.keys() == FIELDS["workerGroupSpecs"]
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


@every_rendering
def test_one_image_has_the_ray_of_the_cluster(name: str) -> None:
    evaluator, nodes = evaluator_of(name), [*cluster_pods(cluster_of(name))]
    containers = [evaluator.container, *evaluator.spec["initContainers"], *(pod.container for pod in nodes)]
    (image,) = {container["image"] for container in containers}
    assert image.endswith("-ray")
    listed = (ROOT / "requirements" / "cluster-ray.txt").read_text(encoding="utf-8")
    (version,) = re.findall(r"^ray==(\S+)", listed, re.MULTILINE)
    assert cluster_of(name)["spec"]["rayVersion"] == version
    assert '"requirements/cluster-${CLUSTER}.txt"' in (ROOT / "Dockerfile").read_text(encoding="utf-8")


def test_ray_changes_no_other_package_of_the_image() -> None:
    def versions(name: str) -> dict[str, str]:
        text = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8")
        return dict(re.findall(r"^([A-Za-z0-9_.-]+)==(\S+)", text, re.MULTILINE))

    with_ray = versions("cluster-ray")
    for image in ("image-cpu", "image-cuda"):
        others = versions(image)
        assert {name: with_ray[name] for name in with_ray.keys() & others.keys()} == {
            name: others[name] for name in with_ray.keys() & others.keys()
        }
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert [requirement.split(">")[0] for requirement in extras["ray"]] == ["ray"]


@every_rendering
def test_the_evaluator_and_its_node_call_the_head_with_the_token_of_the_cluster(name: str) -> None:
    evaluator, cluster = evaluator_of(name), cluster_of(name)
    (node,) = evaluator.spec["initContainers"]
    (port,) = [each["containerPort"] for each in next(cluster_pods(cluster)).container["ports"]]
    address = f"{cluster['metadata']['name']}-head-svc:{port}"  # as KubeRay names the service
    assert evaluator.environment({})["UNDERSTUDY_CLUSTER"] == address
    assert cluster["spec"]["authOptions"]["mode"] == "token"
    for container in (evaluator.container, node):
        variables = {each["name"]: each for each in container["env"]}
        assert variables["RAY_AUTH_MODE"]["value"] == "token"
        assert variables["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"] == {
            "name": cluster["spec"]["authOptions"]["secretName"],
            "key": "auth_token",  # where KubeRay puts it
        }

    assert node["restartPolicy"] == "Always"
    assert node["command"][:2] == ["ray", "start"]
    options = start_options(node["command"][2:])
    assert (options["address"], options["num_cpus"], options["block"]) == (address, 0, True)
    shared = {each["mountPath"]: each["name"] for each in node["volumeMounts"]}
    assert shared.items() <= {each["mountPath"]: each["name"] for each in evaluator.container["volumeMounts"]}.items()
    assert shared.keys() == {"/tmp", "/dev/shm"}  # noqa: S108 - the containers'


@every_rendering
def test_workers_compute_and_the_head_does_not(name: str) -> None:
    spec = cluster_of(name)["spec"]
    assert options_of(spec["headGroupSpec"])["num_cpus"] == 0
    for group in spec["workerGroupSpecs"]:
        assert options_of(group)["num_cpus"] is None  # those of the pod
    for pod, group in zip(
        cluster_pods(cluster_of(name)), [spec["headGroupSpec"], *spec["workerGroupSpecs"]], strict=True
    ):
        port = options_of(group)["node_manager_port"]
        probes = [value for key, value in pod.container.items() if key.endswith("Probe")]
        assert [probe["tcpSocket"]["port"] for probe in probes] == [port] * 3


@every_rendering
def test_the_objects_of_each_node_fit_into_its_shared_memory(name: str) -> None:
    """Ray takes 30% of a pod's memory for them, and a slow folder where that is more than there is shared memory."""
    spec, nodes = cluster_of(name)["spec"], [*cluster_pods(cluster_of(name))]
    for group, pod in zip([spec["headGroupSpec"], *spec["workerGroupSpecs"]], nodes, strict=True):
        assert_objects_fit(options_of(group)["object_store_memory"], pod.spec["volumes"])
    (node,) = evaluator_of(name).spec["initContainers"]
    assert_objects_fit(start_options(node["command"][2:])["object_store_memory"], evaluator_of(name).spec["volumes"])


def assert_objects_fit(size_bytes: int | None, volumes: list[Document]) -> None:
    (memory,) = [
        each["emptyDir"]["sizeLimit"] for each in volumes if each.get("emptyDir", {}).get("medium") == "Memory"
    ]
    assert size_bytes is not None
    assert 2**28 < size_bytes <= 0.8 * int(memory.removesuffix("Gi")) * 2**30


@every_rendering
def test_workers_read_datasets_from_the_evaluator_s_paths_and_change_nothing_there(name: str) -> None:
    def claims(pod: Pod) -> dict[str, tuple[str, bool]]:
        volumes = {each["name"]: each.get("persistentVolumeClaim", {}).get("claimName") for each in pod.spec["volumes"]}
        assert volumes.keys() == {mount["name"] for mount in pod.container["volumeMounts"]}
        return {
            mount["mountPath"]: (volumes[mount["name"]], mount.get("readOnly", False))
            for mount in pod.container["volumeMounts"]
            if volumes[mount["name"]]
        }

    _, workers = cluster_pods(cluster_of(name))
    (path, (claim, _)), *others = claims(evaluator_of(name)).items()
    assert not others
    assert claims(workers) == {path: (claim, True)}


@every_rendering
def test_only_the_evaluator_and_the_cluster_reach_the_cluster(name: str) -> None:
    (policy,) = by_kind(documents_of(name), "NetworkPolicy")
    own = policy["spec"]["podSelector"]["matchLabels"].items()
    assert all(own <= pod.labels.items() for pod in cluster_pods(cluster_of(name)))
    assert not own <= evaluator_of(name).labels.items()
    (rule,) = policy["spec"]["ingress"]
    first, second = (peer["podSelector"]["matchLabels"] for peer in rule["from"])
    assert first.items() == own
    assert second.items() <= evaluator_of(name).labels.items()


def test_the_chart_sets_the_number_of_workers_and_what_they_have() -> None:
    resources = {"limits": {"memory": "32Gi"}, "requests": {"cpu": "8"}}
    (cluster,) = by_kind(chart({"cluster": {"enabled": True, "workers": 7, "resources": resources}}), "RayCluster")
    _, workers = cluster_pods(cluster)
    assert workers.count == 7
    assert workers.container["resources"] == resources
