"""The manifests and the chart against Kubernetes' schemas, against each other, and against the program."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api import models

from testkit.fetched import fetched
from testkit.manifests import (
    RENDERED,
    ROOT,
    Document,
    by_kind,
    cluster_pods,
    documents_of,
    given_labels,
    image_environment,
    overlay,
    pods_of,
)
from understudy.cli.main import main
from understudy.service.http_app import PROBES
from understudy.service.settings import ServeSettings
from understudy.trainer.settings import ClusterSettings

LONGEST_FIRST_START_SECONDS = 900
"""A GPU that is newer than TensorFlow's kernels compiles them, which takes minutes."""
KUBERNETES_VERSIONS = ("1.33", "1.37")
OURS = ("apps", "autoscaling", "batch", "networking.k8s.io", "policy", "v1")
TYPED = {
    "JobSet": models.JobsetV1alpha2JobSet,
    "TrainJob": models.TrainerV1alpha1TrainJob,
    "ClusterTrainingRuntime": models.TrainerV1alpha1ClusterTrainingRuntime,
}
OF_OTHERS = {"BackendTLSPolicy", "Certificate", "GRPCRoute", "Issuer", "PodMonitor", "PrometheusRule", "ScaledObject"}
every_rendering = pytest.mark.parametrize("name", RENDERED)


@every_rendering
def test_kubernetes_knows_every_field(name: str) -> None:
    for document in documents_of(name):
        group = document["apiVersion"].partition("/")[0]
        if group in OURS:
            for version in KUBERNETES_VERSIONS:
                kubernetes_validate.validate(document, version, strict=True)
        elif document["kind"] in TYPED:
            typed = TYPED[document["kind"]].from_dict(document)
            assert typed is not None
            assert_within(document, typed.to_dict(), document["kind"])  # it leaves out what it does not know
    for pod in pods_of(name):
        alone = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": pod.spec}
        kubernetes_validate.validate(alone, KUBERNETES_VERSIONS[-1], strict=True)


def faults_of(resources: list[Document]) -> list[str]:
    """Return what the types of other projects' resources find wrong with some, "" where nothing is."""
    node = shutil.which("node")
    folder = fetched("manifests")  # skips the test without Node
    assert node is not None
    program = Path(__file__).parent / "models" / "validate.mjs"
    done = subprocess.run(
        [node, program], cwd=folder, input=json.dumps(resources), capture_output=True, text=True, timeout=60, check=True
    )
    faults = json.loads(done.stdout)
    assert isinstance(faults, list)
    return faults


def test_other_projects_know_the_fields_of_their_resources() -> None:
    """A field that they do not know is not found in this way, but a missing one is, and one of a wrong type."""
    names = [*RENDERED]
    resources = [document for name in names for document in documents_of(name) if document["kind"] in OF_OTHERS]
    assert {resource["kind"] for resource in resources} == OF_OTHERS
    assert faults_of(resources) == [""] * len(resources)

    (route,) = by_kind(overlay("production"), "GRPCRoute")
    wrong = {**route, "spec": {**route["spec"], "rules": [{"backendRefs": [{"name": "a", "port": "grpc"}]}]}}
    (fault,) = faults_of([wrong])
    assert "port must be integer" in fault


def assert_within(part: Any, whole: Any, path: str) -> None:
    """Check that nothing of a document is missing in another, which may have defaults as well."""
    if isinstance(part, dict) and isinstance(whole, dict):
        assert part.keys() <= whole.keys(), path
        for key, value in part.items():
            assert_within(value, whole[key], f"{path}.{key}")
    elif isinstance(part, list) and isinstance(whole, list):
        assert len(part) == len(whole), path
        for index, value in enumerate(part):
            assert_within(value, whole[index], f"{path}[{index}]")
    else:
        assert part == whole, path


def test_a_field_that_is_misspelt_is_found() -> None:
    (job,) = [document for document in overlay("job") if document["kind"] == "JobSet"]
    wrong = {**job, "spec": {**job["spec"], "sucessPolicy": {"operator": "All"}}}
    typed = models.JobsetV1alpha2JobSet.from_dict(wrong)
    assert typed is not None
    with pytest.raises(AssertionError, match=r"JobSet\.spec"):
        assert_within(wrong, typed.to_dict(), "JobSet")


@every_rendering
def test_no_two_documents_have_one_name(name: str) -> None:
    names = [(document["kind"], document["metadata"]["name"]) for document in documents_of(name)]
    assert len(names) == len({*names})


@every_rendering
def test_no_variable_of_a_pod_is_given_twice(name: str) -> None:
    """The API server refuses that where a manifest is applied on its side, as by Helm 4."""
    for pod in pods_of(name):
        names = [variable["name"] for variable in pod.container["env"]]
        assert len(names) == len({*names}), pod.name


@every_rendering
def test_a_pod_s_command_line_and_variables_are_the_program_s(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for pod in pods_of(name):
        environment = {**image_environment(), **pod.environment(given_labels(pod))}
        ours = {key: value for key, value in environment.items() if key.startswith("UNDERSTUDY_")}
        verb, *arguments = pod.container["args"]
        command = main.get_command(click.Context(main), verb)
        assert command is not None
        known = {option.envvar for option in command.params if isinstance(option, click.Option)}
        assert ours.keys() <= known | {"UNDERSTUDY_ADDRESS_FILE"}, pod.name
        with monkeypatch.context() as patched:
            for key in os.environ:
                if key.startswith("UNDERSTUDY_"):
                    patched.delenv(key)
            for key, value in ours.items():
                patched.setenv(key, value)
            command.make_context(verb, list(arguments))


@every_rendering
def test_a_pod_says_whether_other_machines_are_served_without_tls(name: str) -> None:
    for pod in pods_of(name):
        variables = pod.environment(given_labels(pod)).keys()
        assert len(variables & {"UNDERSTUDY_INSECURE", "UNDERSTUDY_TLS_CERT"}) == 1, pod.name


@every_rendering
def test_an_evaluator_waits_while_the_lock_of_a_node_that_was_lost_is_still_held(name: str) -> None:
    """Otherwise it would end with 1, after which a job is not started again."""
    for pod in pods_of(name):
        if pod.labels["app.kubernetes.io/component"] == "evaluator":
            assert pod.environment(given_labels(pod))["UNDERSTUDY_STANDBY"] == "true"


@every_rendering
def test_ports_are_the_program_s_and_probes_ask_what_it_answers(name: str) -> None:
    defaults = ServeSettings(run_dir=Path("run"))
    program = {
        "grpc": defaults.grpc_port,
        "http": defaults.http_port,
        "metrics": 8501,  # of workers, by --metrics-port
        "cluster": ClusterSettings().cluster_port,
        "tfjob-port": 2222,  # the training operator's own name
    }
    for pod in pods_of(name):
        ports = {port["name"]: port["containerPort"] for port in pod.container["ports"]}
        assert ports.items() <= program.items(), pod.name
        scheme = "HTTPS" if "UNDERSTUDY_TLS_CERT" in pod.environment(given_labels(pod)) else "HTTP"
        probes = {key: value for key, value in pod.container.items() if key.endswith("Probe")}
        assert len(probes) == (3 if "grpc" in ports else 0)
        for probe in probes.values():
            if "httpGet" in probe:
                assert probe["httpGet"]["path"] in PROBES
                assert probe["httpGet"]["port"] in ports
                assert probe["httpGet"].get("scheme", "HTTP") == scheme
            else:
                assert (probe["grpc"]["port"], scheme) == (ports["grpc"], "HTTP")  # without TLS alone
        if probes:
            startup = pod.container["startupProbe"]
            assert startup["periodSeconds"] * startup["failureThreshold"] >= LONGEST_FIRST_START_SECONDS


@every_rendering
def test_a_server_is_given_the_time_to_drain(name: str) -> None:
    for pod in pods_of(name):
        pause = pod.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        needed = pause + ServeSettings(run_dir=Path("run")).drain_seconds
        assert pod.spec["terminationGracePeriodSeconds"] > needed, pod.name


@every_rendering
def test_a_pod_has_no_rights_that_it_does_not_need(name: str) -> None:
    for pod in pods_of(name):
        security = pod.spec["securityContext"]
        assert security["runAsNonRoot"]
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert security["fsGroupChangePolicy"] == "OnRootMismatch"  # else every start looks at each file of a run
        assert pod.spec["automountServiceAccountToken"] is False
        assert pod.container["securityContext"] == {
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {*pod.container["resources"]} == {"requests", "limits"}
        assert "memory" in pod.container["resources"]["limits"]


@every_rendering
def test_every_volume_is_mounted_and_comes_from_somewhere(name: str) -> None:
    documents = documents_of(name)
    claims = {document["metadata"]["name"] for document in by_kind(documents, "PersistentVolumeClaim")} | {"runs"}
    secrets = {document["spec"]["secretName"] for document in by_kind(documents, "Certificate")}
    secrets |= {
        "understudy-callers",
        "understudy-follow",
        "understudy-tls",
    }  # the second is made elsewhere for the chart
    for pod in pods_of(name):
        volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
        mounts = {mount["mountPath"]: mount["name"] for mount in pod.container["volumeMounts"]}
        assert {*mounts.values()} == {*volumes}
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"  # noqa: S108 - the container's
        for volume in volumes.values():
            assert volume.get("persistentVolumeClaim", {}).get("claimName") in claims | {None}
            assert volume.get("secret", {}).get("secretName") in secrets | {None}
        for path in pod.environment(given_labels(pod)).values():
            assert not path.startswith("/") or any(path.startswith(f"{mount}/") for mount in mounts), path


@every_rendering
def test_what_selects_pods_finds_them(name: str) -> None:
    documents, all_pods = documents_of(name), pods_of(name)
    for document in documents:
        kind, spec = document["kind"], document["spec"]
        selectors = {
            "Deployment": [spec.get("selector", {}).get("matchLabels")],
            "PodDisruptionBudget": [spec.get("selector", {}).get("matchLabels")],
            "PodMonitor": [spec.get("selector", {}).get("matchLabels")],
            "Service": [spec.get("selector")],
        }.get(kind, [])
        for selector in selectors:
            assert any(selector.items() <= pod.labels.items() for pod in all_pods), document["metadata"]["name"]
        if kind == "Service":
            targets = [pod for pod in all_pods if spec["selector"].items() <= pod.labels.items()]
            for pod in targets:
                ports = {port["name"]: port["containerPort"] for port in pod.container["ports"]}
                for port in spec["ports"]:
                    assert port["port"] == ports[port["targetPort"]]
        if kind in ("HorizontalPodAutoscaler", "ScaledObject"):
            scaled = {each["metadata"]["name"] for each in by_kind(documents, "Deployment")}
            assert spec["scaleTargetRef"]["name"] in scaled
            assert spec["scaleTargetRef"]["name"] == document["metadata"]["name"]  # so none has two
    for pod in all_pods:
        for constraint in pod.spec.get("topologySpreadConstraints", ()):
            assert constraint["labelSelector"]["matchLabels"].items() <= pod.labels.items()


def test_network_policies_let_the_evaluator_and_its_cluster_talk() -> None:
    """Ray's nodes call each other on ports of their own, and the evaluator's pod is one of them."""
    documents = documents_of("chart-cluster")
    (cluster,) = by_kind(documents, "RayCluster")
    policies = {document["metadata"]["name"]: document["spec"] for document in by_kind(documents, "NetworkPolicy")}
    nodes = policies["understudy-cluster"]["podSelector"]
    assert all(nodes["matchLabels"].items() <= pod.labels.items() for pod in cluster_pods(cluster))
    servers = policies["understudy-servers"]
    assert {"from": [{"podSelector": nodes}]} in servers["ingress"]
    assert {"to": [{"podSelector": nodes}]} in servers["egress"]


@pytest.mark.parametrize("name", ["production", "chart-everything"])
def test_the_rules_are_those_that_the_prometheus_of_one_machine_has(name: str) -> None:
    documents = documents_of(name)
    (rule,) = by_kind(documents, "PrometheusRule")
    files = [ROOT / "deploy" / "prometheus" / name for name in ("alerts.yml", "objectives.yml")]
    groups = [group for file in files for group in yaml.safe_load(file.read_text(encoding="utf-8"))["groups"]]
    assert rule["spec"] == {"groups": groups}
    (monitor,) = by_kind(documents, "PodMonitor")
    assert monitor["spec"]["jobLabel"] == "app.kubernetes.io/name"
    servers = [pod for pod in pods_of(name) if "grpc" in {port["name"] for port in pod.container["ports"]}]
    assert {pod.labels["app.kubernetes.io/name"] for pod in servers} == {"understudy"}  # the job of the rules


def test_certificates_name_the_services() -> None:
    documents = documents_of("production")
    (certificate,) = [each for each in by_kind(documents, "Certificate") if not each["spec"].get("isCA")]
    services = {document["metadata"]["name"] for document in by_kind(documents, "Service")}
    assert services <= {*certificate["spec"]["dnsNames"]}
