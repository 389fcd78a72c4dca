"""Writes the reference pages' tables of metrics and settings from the code.

python tools/reference.py            write them
python tools/reference.py --check    exit with 1 if they differ from the code
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from understudy.checkpoints.layout import RunDir
from understudy.checkpoints.training import TrainingJournal, TrainingProgress
from understudy.evaluator.evaluation.drift import DriftReport, FeatureDrift
from understudy.evaluator.evaluation.drift_monitor import LiveDrift
from understudy.evaluator.evaluation.training_end import TrainingWatch
from understudy.evaluator.records.outbox import DeliveryCounts
from understudy.evaluator.settings import EvaluatorSettings
from understudy.evaluator.types import EvaluationOutcome, EvaluationRecord, GpuReading
from understudy.service.calls.caller import RefusalCounter
from understudy.service.calls.methods import RpcMethod
from understudy.service.calls.metrics import InferenceStatistics, RpcMetrics
from understudy.service.evaluator_metrics import EvaluatorCollector, RunCollector, ServiceObserver
from understudy.service.events.deliveries import EventMetrics
from understudy.service.fleet.fleet_state import FleetMetrics
from understudy.service.refreshed_files import ReloadGauge
from understudy.service.settings import ServeSettings
from understudy.service.tracing.tracing import SpanExport
from understudy.service.traffic.traffic_sample import DriftMetrics, RequestLogMetrics
from understudy.trainer.settings import ClusterSettings, TrainSettings
from understudy.trainer.training_metrics import TrainingMetrics

_REFERENCE = Path(__file__).parent.parent / "docs" / "reference"


class _IdleEvaluator:
    """A stub of an evaluator with one device and no serving version, for the gauges' collector."""

    replicas = 1
    source_failures = 0
    serving_step = latest_step = best_step = rollout = None

    def checkpoint_age_seconds(self) -> None:
        """Return none."""

    def checkpoints_waiting(self) -> int:
        """Return none."""
        return 0

    def device_memory(self) -> dict[tuple[str, str], int]:
        """Return one device."""
        return {("GPU:0", "current"): 0}

    def gpu_readings(self) -> dict[str, GpuReading]:
        """Report all NVML values."""
        reading = GpuReading(
            memory_used_bytes=0, memory_total_bytes=0, utilization=0.0, corrected_errors=0, uncorrected_errors=0
        )
        return {"GPU:0": reading}


class _IdleLink:
    """A stub of a connection, for the gauge of servers that follow."""

    is_connected = False


class _FullOutbox:
    """A stub of an outbox with one destination."""

    def counts(self) -> dict[str, DeliveryCounts]:
        """Return one destination."""
        return {"example.com": DeliveryCounts()}

    def dropped(self) -> dict[str, int]:
        """Return none."""
        return {}


def _drift() -> LiveDrift:
    """Return the drift of one input."""
    feature = FeatureDrift(
        name="x", kind="input", psi=0, psi_by_chance=0, ks=0, ks_error=0, reference_count=1, count=1, bins=()
    )
    inputs, scores = DriftReport(features=(feature,)), DriftReport(features=())
    return LiveDrift(dataset="test", step=1, examples=1, computed_at=0.0, inputs=inputs, scores=scores)


def metrics_table() -> str:
    """Return a Markdown table of every metric."""
    lines = ["| metric | kind | labels | what |", "|---|---|---|---|"]
    for metric in _every_metric():
        labels = sorted({label for sample in metric.samples for label in sample.labels} - {"le"})
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        shown = ", ".join(f"`{label}`" for label in labels)
        lines.append(f"| `{name}` | {metric.type} | {shown} | {metric.documentation} |")
    return "\n".join(lines)


def _every_metric() -> list[Metric]:
    """Collect the metrics of a training task, and of a service after one evaluation, with one method."""
    registry = CollectorRegistry()
    observer = ServiceObserver(registry, statistics=InferenceStatistics(), on_record=lambda: None)
    RpcMetrics(registry, [RpcMethod(service="understudy.v1.PredictionService", name="Predict", rpc_type="unary")])
    RefusalCounter(registry)
    ReloadGauge(registry).show("certificates", is_current=True)
    RequestLogMetrics(registry)
    DriftMetrics(registry).computed(_drift())
    SpanExport(registry).shutdown()
    FleetMetrics(registry, _IdleLink())
    EventMetrics(registry, ["example.com"], _FullOutbox())  # type: ignore[arg-type] # all that it asks
    TrainingMetrics(None, first_step=0, global_batch_size=1, restarts=0, registry=registry)
    registry.register(EvaluatorCollector(_IdleEvaluator()))  # type: ignore[arg-type] # all that it asks
    observer.evaluation_recorded(
        EvaluationRecord(
            sequence=1,
            step=1,
            checkpoint_digest="",
            dataset="test",
            outcome=EvaluationOutcome.SCORED,
            metrics={"loss": 0.0},
        )
    )
    with tempfile.TemporaryDirectory() as run:
        journal = TrainingJournal(RunDir(Path(run)))
        journal.record_step(1, TrainingProgress(metrics={"loss": 0.0}))
        with journal:
            registry.register(RunCollector(TrainingWatch(Path(run))))
            return sorted(registry.collect(), key=lambda metric: metric.name)


def settings_table() -> str:
    """Return Markdown tables of the settings of ``serve`` and ``train``; ``run`` has both sets."""
    return "\n\n".join(
        [
            "`understudy serve`\n\n" + _table(ServeSettings, EvaluatorSettings),
            "`understudy train`\n\n" + _table(TrainSettings, ClusterSettings),
            "`understudy run` takes all of them.",
        ],
    )


def _table(*settings_types: type[Any]) -> str:
    leaves: dict[str, tuple[dataclasses.Field[Any], Any]] = {}
    for settings_type in settings_types:
        for field, annotation in _leaves(settings_type):
            leaves.setdefault(field.name, (field, annotation))
    return "\n".join(["| flag | default | what |", "|---|---|---|", *(_row(*leaf) for leaf in leaves.values())])


def _row(field: dataclasses.Field[Any], annotation: Any) -> str:
    flag = "--" + field.name.replace("_", "-")
    text = field.metadata["help"].replace("|", "\\|")
    choices = field.metadata.get("choices") or _literals(annotation)
    known = f" One of {', '.join(f'`{choice}`' for choice in choices)}." if choices else ""
    return f"| `{flag}` | {_default(field)} | {text}{known} |"


def _leaves(settings_type: type[Any]) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
    annotations = get_type_hints(settings_type)
    for field in dataclasses.fields(settings_type):
        annotation = annotations[field.name]
        if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
            yield from _leaves(annotation)
        else:
            yield field, annotation


def _literals(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
        return "required"
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return "" if value in (None, (), {}) else f"`{value}`"


SECTIONS = {
    "METRICS": (_REFERENCE / "metrics.md", metrics_table),
    "SETTINGS": (_REFERENCE / "settings.md", settings_table),
}
"""The page that holds each table, and the function that builds the table."""


def with_section(text: str, name: str, content: str) -> str:
    """Return ``text`` with the part between the markers of ``name`` replaced.

    Raises:
        ValueError: The markers do not occur exactly once.
    """
    pattern = re.compile(rf"(<!-- BEGIN {name} [^>]*-->\n).*?(<!-- END {name} -->)", re.DOTALL)
    replaced, count = pattern.subn(lambda match: f"{match[1]}{content}\n{match[2]}", text)
    if count != 1:
        raise ValueError(f"found {count} sections marked BEGIN {name}; expected one")
    return replaced


def main() -> int:
    """Write or check the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    stale = []
    for name, (page, table) in SECTIONS.items():
        text = page.read_text(encoding="utf-8")
        wanted = with_section(text, name, table())
        if text != wanted:
            stale.append(page.name)
            if not check:
                page.write_text(wanted, encoding="utf-8")
    if check and stale:
        print(f"docs/reference/{', '.join(stale)} differ from the code; run `make reference`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
