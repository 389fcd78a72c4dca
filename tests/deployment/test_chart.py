"""The chart against Helm, against the overlays, and against wrong values."""

from __future__ import annotations

from typing import Any

import helm_python
import pytest

from testkit.manifests import (
    CHART,
    NETWORK,
    Document,
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
