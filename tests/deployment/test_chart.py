"""The chart against Helm, against the overlays, and against wrong values."""

from __future__ import annotations

from typing import Any

import helm_python
import pytest

from testkit.manifests import (
    CHART,
    NETWORK,
    Document,
    by_kind,
    chart,
    overlay,
    pods,
    pods_of,
)


def test_the_chart_has_no_fault_that_helm_finds() -> None:
    found = helm_python.lint(CHART)
    assert not found["errors"]
    assert [message["error"] for message in found["messages"]] == ["icon is recommended"]


def test_the_chart_without_values_renders_the_evaluator_of_the_overlay() -> None:
    def sorted_by_name(documents: list[Document]) -> list[Document]:
        return sorted(documents, key=lambda document: (document["kind"], document["metadata"]["name"]))

    charted = chart({})
    (claim,) = by_kind(charted, "PersistentVolumeClaim")
    del claim["metadata"]["annotations"]  # of Helm
    assert sorted_by_name(charted) == sorted_by_name(overlay("evaluator"))


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


def test_variables_of_the_values_replace_those_of_the_manifests() -> None:
    values = {
        "evaluator": {"env": {"UNDERSTUDY_STANDBY": False, "UNDERSTUDY_MAX_QUEUE_EXAMPLES": 2_000_000}},
        "fleet": {"enabled": True, "network": True, "env": {"UNDERSTUDY_FOLLOW": "a:8500,b:8500"}},
    }
    evaluator, fleet = pods(chart(values))
    assert evaluator.environment({}) == {
        "UNDERSTUDY_INSECURE": "true",
        "UNDERSTUDY_STANDBY": "false",
        "UNDERSTUDY_MAX_QUEUE_EXAMPLES": "2000000",
    }
    assert fleet.environment({})["UNDERSTUDY_FOLLOW"] == "a:8500,b:8500"
    for pod in (evaluator, fleet):
        assert len(pod.container["env"]) == len(pod.environment({}))


def test_the_canary_stays_pinned_whatever_variables_its_fleet_has() -> None:
    env = {"UNDERSTUDY_FOLLOW": "a:8500", "UNDERSTUDY_VERSION_POLICY": "best", "UNDERSTUDY_SLOTS": 2}
    (canary,) = [
        pod
        for pod in pods(chart({"fleet": {"enabled": True, "env": env}, "canary": {"enabled": True, "step": 20000}}))
        if pod.role == "understudy-fleet-canary"
    ]
    assert canary.environment({}) == {
        "UNDERSTUDY_INSECURE": "true",
        "UNDERSTUDY_SLOTS": "2",
        "UNDERSTUDY_VERSION_POLICY": "20000",
    }


def test_uninstalling_the_chart_keeps_the_run() -> None:
    (claim,) = by_kind(chart({}), "PersistentVolumeClaim")
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def by_name(items: list[Document]) -> list[Document]:
    return sorted(items, key=lambda item: str(item["name"]))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"canary": {"enabled": True}}, r"canary\.enabled needs fleet\.enabled"),
        ({"fleet": {"enabled": True, "followSecret": "s"}}, r"fleet\.followSecret needs fleet\.network"),
        ({"job": {"enabled": True}}, r"job\.enabled needs evaluator\.enabled=false"),
        ({"gateway": {"name": "gateway"}}, r"gateway\.name needs fleet\.enabled"),
        (
            {"fleet": {"enabled": True, "network": True}, "tls": {"secret": "s"}, "callers": {"secret": "s"}},
            r"callers\.secret with fleet\.network needs fleet\.followSecret",
        ),
        ({"evaluator": {"env": {"UNDERSTUDY_GRPC_PORT": 9000}}}, "UNDERSTUDY_GRPC_PORT.* ports 8500 and 8501"),
        ({"fleet": {"enabled": True, "env": {"UNDERSTUDY_HTTP_PORT": 9000}}}, "UNDERSTUDY_HTTP_PORT.* ports"),
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
