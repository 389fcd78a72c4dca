"""The manifests of a fleet: its route, its gateway, how it follows the evaluator, and how it is scaled."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from testkit.manifests import (
    EVERYTHING,
    KUBERNETES,
    ROOT,
    by_kind,
    chart,
    documents_of,
    given_labels,
    overlay,
    pods_of,
    render,
)


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
    endpoint, of_workers = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["scheme"] == "https"
    assert endpoint["tlsConfig"] == {
        "ca": {"secret": {"name": "understudy-tls", "key": "ca.crt"}},
        "serverName": "understudy-fleet",
    }
    assert endpoint["authorization"] == {"credentials": {"name": "understudy-observer", "key": "token"}}
    assert of_workers == {"port": "metrics", "path": "/metrics", "interval": "15s"}  # which have neither


def test_with_tls_and_callers_the_evaluator_of_a_job_has_them_too_and_prometheus_finds_its_workers() -> None:
    documents = documents_of("chart-secure-job")
    (monitor,) = by_kind(documents, "PodMonitor")
    schemes = {each["port"]: each.get("scheme", "http") for each in monitor["spec"]["podMetricsEndpoints"]}
    policies = {document["metadata"]["name"]: document["spec"] for document in by_kind(documents, "NetworkPolicy")}
    for pod in pods_of("chart-secure-job"):
        ours = {key for key in pod.environment(given_labels(pod)) if re.search("TLS|CALLERS|INSECURE", key)}
        (port,) = [port["name"] for port in pod.container["ports"] if port["containerPort"] == 8501]
        if pod.role == "evaluator":
            assert ours == {"UNDERSTUDY_TLS_CERT", "UNDERSTUDY_TLS_KEY", "UNDERSTUDY_CALLERS"}
            assert schemes[port] == "https"
        else:
            assert ours == {"UNDERSTUDY_INSECURE"}
            assert schemes[port] == "http"
            ingress = policies["understudy-workers"]["ingress"]
            assert [rule["ports"] for rule in ingress if "ports" in rule] == [[{"port": port}]]


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


@pytest.mark.parametrize("namespace", ["default", "digits"])
def test_keda_counts_the_requests_of_the_fleet_s_own_namespace_only(namespace: str, tmp_path: Path) -> None:
    documents = overlay("fleet-keda") if namespace == "default" else render(in_namespace(namespace, tmp_path))
    (scaler,) = by_kind(documents, "ScaledObject")
    (trigger,) = scaler["spec"]["triggers"]
    assert f'{{namespace="{namespace}",pod=' in trigger["metadata"]["query"]
    assert {document["metadata"]["namespace"] for document in documents} == {namespace}
    # where the query finds nothing, as in a namespace that was not named, KEDA must not scale to the minimum
    assert trigger["metadata"]["ignoreNullValues"] == "false"


def in_namespace(namespace: str, folder: Path) -> Path:
    """Return an overlay as docs/how-to/kubernetes.md has it."""
    above = os.path.relpath(KUBERNETES, folder.resolve())
    kustomization = {
        "namespace": namespace,
        "resources": [f"{above}/overlays/fleet-keda"],
        "transformers": [f"{above}/components/keda/namespace"],
    }
    (folder / "kustomization.yaml").write_text(json.dumps(kustomization), encoding="utf-8")
    return folder
