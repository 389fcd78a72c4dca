"""The manifests and the chart against Kubernetes' schemas, against each other, and against the program."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import helm_python
import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api import models

from testkit.fetched import fetched
from testkit.manifests import (
    CHART,
    OVERLAYS,
    ROOT,
    Document,
    Pod,
    by_kind,
    chart,
    cluster_pods,
    image_environment,
    overlay,
    pods,
    replicated_jobs,
)
from understudy.cli.command_errors import TRAINING_FAILED
from understudy.cli.main import main
from understudy.cli.supervisor import _RESTARTABLE
from understudy.service.http_app import PROBES
from understudy.service.settings import ServeSettings
from understudy.trainer import NonFiniteLossError, TFConfigError
from understudy.trainer.cluster_variables import adopt
from understudy.trainer.settings import ClusterSettings
from understudy.trainer.tf_config import parse

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
USAGE_ERROR = 2

EVERYTHING: dict[str, Any] = {
    "evaluator": {"env": {"UNDERSTUDY_VERSION_POLICY": "best"}, "args": ["--monitor", "loss"]},
    "fleet": {"enabled": True, "minReplicas": 2, "resources": {"limits": {"memory": "2Gi"}, "requests": {"cpu": "1"}}},
    "canary": {"enabled": True, "step": 20000, "weight": 25},
    "gateway": {"name": "gateway", "hostnames": ["understudy.example.com"]},
    "tls": {"secret": "understudy-tls"},
    "callers": {"secret": "understudy-callers"},
    "monitoring": {"enabled": True, "tokenSecret": "understudy-observer"},
    "networkPolicy": {"enabled": True},
    "run": {"claim": "runs"},
}
NETWORK: dict[str, Any] = {
    "fleet": {"enabled": True, "network": True, "followSecret": "understudy-follow"},
    "canary": {"enabled": True, "step": 20000},
    "tls": {"secret": "understudy-tls"},
    "callers": {"secret": "understudy-callers"},
}
JOB: dict[str, Any] = {
    "evaluator": {"enabled": False},
    "job": {"enabled": True, "name": "flowers", "workers": 4, "env": {"UNDERSTUDY_SEED": 7}},
    "fleet": {"enabled": True},
}
CLUSTER: dict[str, Any] = {
    "cluster": {"enabled": True, "workers": 3},
    "networkPolicy": {"enabled": True},
    "run": {"claim": "runs"},
}
CHARTS = {
    "chart": {},
    "chart-everything": EVERYTHING,
    "chart-network": NETWORK,
    "chart-job": JOB,
    "chart-cluster": CLUSTER,
}
RENDERED = [*OVERLAYS, *CHARTS]


def documents_of(name: str) -> list[Document]:
    return chart(CHARTS[name]) if name in CHARTS else overlay(name)


def pods_of(name: str) -> list[Pod]:
    return [*pods(documents_of(name))]


every_rendering = pytest.mark.parametrize("name", RENDERED)
every_overlay = pytest.mark.parametrize("name", OVERLAYS)


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
def test_ports_are_the_program_s_and_probes_ask_what_it_answers(name: str) -> None:
    defaults = ServeSettings(run_dir=Path("run"))
    program = {
        "grpc": defaults.grpc_port,
        "http": defaults.http_port,
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


@pytest.mark.parametrize(("name", "weights"), [("production", [90, 10]), ("chart-everything", [75, 25])])
def test_the_route_s_weights_are_shares_of_services_that_exist(name: str, weights: list[int]) -> None:
    documents = documents_of(name)
    (route,) = by_kind(documents, "GRPCRoute")
    (rule,) = route["spec"]["rules"]
    services = {document["metadata"]["name"]: document["spec"] for document in by_kind(documents, "Service")}
    assert [backend["weight"] for backend in rule["backendRefs"]] == weights
    selected = []
    for backend in rule["backendRefs"]:
        assert backend["port"] in [port["port"] for port in services[backend["name"]]["ports"]]
        selected.append(services[backend["name"]]["selector"])
    assert selected[0] != selected[1]


@pytest.mark.parametrize("name", ["production", "production-network", "chart-everything"])
def test_a_gateway_speaks_tls_to_the_servers_of_the_route(name: str) -> None:
    documents = documents_of(name)
    (route,), (policy,) = by_kind(documents, "GRPCRoute"), by_kind(documents, "BackendTLSPolicy")
    services = {document["metadata"]["name"]: document for document in by_kind(documents, "Service")}
    behind = {backend["name"] for rule in route["spec"]["rules"] for backend in rule["backendRefs"]}
    assert {target["name"] for target in policy["spec"]["targetRefs"]} == behind
    for service in behind:  # "h2c" would say that they speak no TLS
        assert not [port for port in services[service]["spec"]["ports"] if "appProtocol" in port]
    (reference,) = policy["spec"]["validation"]["caCertificateRefs"]
    assert reference == {"group": "", "kind": "Secret", "name": "understudy-tls"}
    assert policy["spec"]["validation"]["hostname"] in behind
    assert not by_kind(chart({**EVERYTHING, "tls": {}}), "BackendTLSPolicy")


@pytest.mark.parametrize("name", ["production", "production-network", "chart-everything"])
def test_prometheus_is_a_caller_over_tls_where_servers_ask_for_one(name: str) -> None:
    (monitor,) = by_kind(documents_of(name), "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["scheme"] == "https"
    assert endpoint["tlsConfig"] == {
        "ca": {"secret": {"name": "understudy-tls", "key": "ca.crt"}},
        "serverName": "understudy-fleet",
    }
    assert endpoint["authorization"] == {"credentials": {"name": "understudy-observer", "key": "token"}}


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


BY_VOLUME = ["fleet", "production", "fleet-keda", "chart-everything"]
BY_NETWORK = ["fleet-network", "production-network", "chart-network"]


@pytest.mark.parametrize("name", BY_VOLUME + BY_NETWORK)
def test_the_fleet_follows_the_evaluator_and_the_canary_does_not(name: str) -> None:
    source = "understudy-evaluator:8500" if name in BY_NETWORK else "/run-folder/evaluator"
    for pod in pods_of(name):
        component = pod.labels["app.kubernetes.io/component"]
        follows = pod.environment(given_labels(pod)).get("UNDERSTUDY_FOLLOW")
        pinned = pod.environment(given_labels(pod)).get("UNDERSTUDY_VERSION_POLICY")
        if component == "fleet":
            assert (follows, pinned) == (source, None)
            assert ("run" in {volume["name"] for volume in pod.spec["volumes"]}) == (name in BY_VOLUME)
        elif component == "fleet-canary":
            assert (follows, pinned) == (None, "20000")


@pytest.mark.parametrize("name", BY_NETWORK)
def test_a_fleet_that_follows_over_the_network_calls_a_service_and_port_of_the_evaluator(name: str) -> None:
    documents = documents_of(name if name != "fleet-network" else "evaluator")
    services = {document["metadata"]["name"]: document["spec"] for document in by_kind(documents, "Service")}
    assert 8500 in [port["port"] for port in services["understudy-evaluator"]["ports"]]
    for policy in by_kind(documents, "NetworkPolicy"):
        if policy["metadata"]["name"] == "understudy-servers":
            evaluator = {"app.kubernetes.io/name": "understudy", "app.kubernetes.io/component": "evaluator"}
            peers = [rule["to"] for rule in policy["spec"]["egress"] if {"port": "grpc"} in rule.get("ports", ())]
            assert peers == [[{"podSelector": {"matchLabels": evaluator}}]]


@pytest.mark.parametrize("name", BY_VOLUME + BY_NETWORK)
def test_the_fleet_is_scaled_by_a_metric_that_the_program_has(name: str) -> None:
    documents = documents_of(name)
    reference = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    assert "| `understudy_queue_examples` | gauge |" in reference
    for scaler in by_kind(documents, "HorizontalPodAutoscaler"):
        (metric,) = scaler["spec"]["metrics"]
        assert metric["pods"]["metric"]["name"] == "understudy_queue_examples"
    for scaler in by_kind(documents, "ScaledObject"):
        (trigger,) = scaler["spec"]["triggers"]
        assert "(understudy_queue_examples{" in trigger["metadata"]["query"]
        (pattern,) = re.findall(r'pod=~"([^"]+)"', trigger["metadata"]["query"])
        assert re.fullmatch(pattern, "understudy-fleet-6d9c7f8b5-x2x4z")
        assert not re.fullmatch(pattern, "understudy-fleet-canary-6d9c7f8b5-x2x4z")
        behavior = scaler["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        (autoscaler,) = by_kind(overlay("fleet"), "HorizontalPodAutoscaler")
        assert behavior == autoscaler["spec"]["behavior"]  # `cooldownPeriod` is about no servers at all
    kinds = {document["kind"] for document in documents}
    assert len(kinds & {"HorizontalPodAutoscaler", "ScaledObject"}) == 1


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


def given_labels(pod: Pod) -> dict[str, str]:
    """Return the labels that JobSet's controller gives the pod."""
    prefix = "jobset.sigs.k8s.io"
    return {f"{prefix}/jobset-name": pod.owner["metadata"]["name"], f"{prefix}/replicatedjob-name": pod.role}


@pytest.mark.parametrize("name", ["job", "job-gpu", "trainjob", "chart-job"])
def test_every_task_of_a_job_derives_the_same_cluster(name: str) -> None:
    documents = documents_of(name)
    tasks = [pod for pod in pods_of(name) if pod.job is not None]
    jobs = by_kind(documents, "TrainJob")
    changed = {each["name"]: each["value"] for job in jobs for each in job["spec"]["trainer"]["env"]}
    own_name = jobs[0]["metadata"]["name"] if jobs else tasks[0].owner["metadata"]["name"]
    clusters = []
    for pod in tasks:
        count = jobs[0]["spec"]["trainer"]["numNodes"] if jobs and pod.role == "node" else pod.count
        for index in range(count):
            labels = {**given_labels(pod), "jobset.sigs.k8s.io/jobset-name": own_name}
            environ = {**pod.environment(labels), "JOB_COMPLETION_INDEX": str(index)}
            if pod.role == "node":
                environ |= changed
            line = adopt(environ, settings_of(environ))
            assert line is not None
            assert "by the variables of JobSet" in line
            task = parse(environ)
            assert task is not None
            address = f"{own_name}-{pod.role}-0-{index}.{own_name}:2222"
            assert task.cluster[task.role][task.index] == address
            clusters.append(task.cluster["worker"] if task.role == "worker" else None)
    workers = [cluster for cluster in clusters if cluster]
    assert len(workers) == len(workers[0])
    assert len({*workers}) == 1


def settings_of(environ: Mapping[str, str]) -> ClusterSettings:
    tasks = dict(each.split("=") for each in environ["UNDERSTUDY_CLUSTER_TASKS"].split(","))
    return ClusterSettings(cluster_tasks={role: int(count) for role, count in tasks.items()})


@pytest.mark.parametrize("name", ["job", "trainjob", "chart-job"])
def test_a_job_starts_again_after_the_statuses_that_a_restart_mends_and_no_others(name: str) -> None:
    hopeless_training = {TFConfigError.exit_code, USAGE_ERROR, NonFiniteLossError.exit_code}
    hopeless_evaluation = {1, USAGE_ERROR, TRAINING_FAILED}
    for document in documents_of(name):
        for replicated in replicated_jobs(document):
            job = replicated["template"]["spec"]
            assert job["template"]["spec"]["restartPolicy"] == "Never"  # which a failure policy requires
            (rule,) = [rule for rule in job["podFailurePolicy"]["rules"] if rule["action"] == "FailJob"]
            (container,) = job["template"]["spec"]["containers"]
            assert rule["onExitCodes"]["containerName"] == container["name"]
            statuses = {*rule["onExitCodes"]["values"]}
            assert statuses == (hopeless_evaluation if replicated["name"] == "evaluator" else hopeless_training)
            assert not statuses & {*_RESTARTABLE}
            assert "--exit-when-finished" in container["args"]
            # Workers start again together, by the JobSet; the evaluator alone, by its Job.
            assert (job["backoffLimit"] == 0) == (replicated["name"] != "evaluator")


@pytest.mark.parametrize("name", ["job", "trainjob", "chart-job"])
def test_a_job_succeeds_with_its_evaluator(name: str) -> None:
    found = 0
    for document in documents_of(name):
        if replicated_jobs(document):
            spec = document["spec"] if document["kind"] == "JobSet" else document["spec"]["template"]["spec"]
            assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["evaluator"]}
            (rule,) = spec["failurePolicy"]["rules"]
            assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
            assert spec["failurePolicy"]["maxRestarts"] > 0
            found += 1
    assert found == 1


@pytest.mark.parametrize("name", ["evaluator-gpu", "job-gpu"])
def test_with_gpus_every_pod_has_one_and_is_told_to_use_it(name: str) -> None:
    for pod in pods_of(name):
        assert pod.container["resources"]["limits"]["nvidia.com/gpu"] >= 1
        assert pod.environment(given_labels(pod))["UNDERSTUDY_DEVICES"] == "GPU"
        assert pod.container["image"].endswith("-gpu")


def test_an_evaluator_with_gpus_keeps_compiled_kernels() -> None:
    (pod,) = pods_of("evaluator-gpu")
    mounts = {mount["mountPath"]: mount["name"] for mount in pod.container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
    cache = pod.environment({})["CUDA_CACHE_PATH"]
    assert "persistentVolumeClaim" in volumes[mounts[str(Path(cache).parent)]]


def test_the_chart_has_no_fault_that_helm_finds() -> None:
    found = helm_python.lint(CHART)
    assert not found["errors"]
    assert [message["error"] for message in found["messages"]] == ["icon is recommended"]


def test_the_chart_without_values_renders_the_evaluator_of_the_overlay() -> None:
    def sorted_by_name(documents: list[Document]) -> list[Document]:
        return sorted(documents, key=lambda document: (document["kind"], document["metadata"]["name"]))

    assert sorted_by_name(chart({})) == sorted_by_name(overlay("evaluator"))


@pytest.mark.parametrize("name", ["production", "production-network"])
def test_the_chart_with_the_overlays_components_renders_its_fleet(name: str) -> None:
    """The same manifests, changed by two programs."""
    values = NETWORK if name == "production-network" else {**NETWORK, "fleet": {"enabled": True}}
    charted = {pod.role: pod for pod in pods(chart(values))}
    for pod in pods_of(name):
        other = charted[pod.role]
        assert pod.labels == other.labels
        assert pod.environment({}) == other.environment({})
        if pod.role != "understudy-evaluator":
            assert pod.container["args"] == other.container["args"]
        assert by_name(pod.container["volumeMounts"]) == by_name(other.container["volumeMounts"])
        assert by_name(pod.spec["volumes"]) == by_name(other.spec["volumes"])
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert pod.container[probe] == other.container[probe]


def by_name(items: list[Document]) -> list[Document]:
    return sorted(items, key=lambda item: str(item["name"]))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"canary": {"enabled": True}}, r"canary\.enabled needs fleet\.enabled"),
        ({"fleet": {"enabled": True, "followSecret": "s"}}, r"fleet\.followSecret needs fleet\.network"),
        ({"job": {"enabled": True}}, r"job\.enabled needs evaluator\.enabled=false"),
        ({"evaluater": {"enabled": False}}, "evaluater"),
        ({"job": {"workers": 0}}, "workers"),
        ({"cluster": {"workers": 0}}, "workers"),
        ({"cluster": {"enabled": True}, "evaluator": {"enabled": False}}, r"cluster\.enabled needs evaluator\.enabled"),
        ({"canary": {"weight": 110}}, "weight"),
        ({"job": {"name": "My Job"}}, "name"),
        ({"fleet": {"env": {"understudy-slots": "2"}}}, "understudy-slots"),
    ],
)
def test_values_that_the_chart_cannot_use_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(helm_python.HelmError, match=message):
        chart(values)
