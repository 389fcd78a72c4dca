"""Writes what operators load into Prometheus and Grafana: burn-rate rules with their alerts, and three dashboards.

python tools/monitoring.py            write deploy/prometheus/objectives.yml, deploy/grafana/*.json, and all rules for
                                      the Prometheus operator, deploy/kubernetes/components/monitoring/rules.yaml
python tools/monitoring.py --check    exit with 1 if they differ

The alerts compare how fast an error budget is used up over two windows each, a long one against noise and a short one
so that an alert ends soon after its cause (Google, "The Site Reliability Workbook", chapter 5, table 5-8).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement, TooltipDisplayMode
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableHide

_DEPLOY = Path(__file__).parent.parent / "deploy"
_RUNBOOK = "docs/how-to/alerts.md"

WINDOWS = ("5m", "30m", "1h", "6h", "3d")
_FAST = ((14.4, "1h", "5m"), (6.0, "6h", "30m"))
_SLOW = ((1.0, "3d", "6h"),)


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A share of events that must be good.

    Attributes:
        name: The name of the recorded ratio of bad events.
        alert: The beginning of the alerts' names.
        good: The share that must be good, over 30 days.
        bad: The query of the number of bad events; ``WINDOW`` stands for the window.
        all: The query of the number of all events.
        summary: What the alert says.
    """

    name: str
    alert: str
    good: float
    bad: str
    all: str
    summary: str


_WHERE = "{{ with $labels.namespace }}{{ . }}/{{ end }}{{ $labels.job }}"
_CALLS = 'grpc_service!~"grpc[.].*"'
_FAILED = 'grpc_code=~"DataLoss|DeadlineExceeded|Internal|ResourceExhausted|Unavailable|Unknown"'
_PREDICTIONS = 'grpc_type="unary",grpc_method=~"Classify|ModelInfer|MultiInference|Predict|Regress"'


def _count(series: str) -> str:
    return f"sum by (namespace, job) (increase({series}[WINDOW]))"


def _above(bound: str, histogram: str, *labels: str) -> str:
    every, within = ",".join(labels), ",".join([*labels, f'le="{bound}"'])
    return f"{_count(f'{histogram}_count{{{every}}}')} - {_count(f'{histogram}_bucket{{{within}}}')}"


OBJECTIVES = (
    Objective(
        name="calls_failed",
        alert="UnderstudyCallsFail",
        good=0.999,
        bad=_count(f"grpc_server_handled_total{{{_CALLS},{_FAILED}}}"),
        all=_count(f"grpc_server_handled_total{{{_CALLS}}}"),
        summary="calls fail by the service's fault",
    ),
    Objective(
        name="predictions_slow",
        alert="UnderstudyPredictionsSlow",
        good=0.99,
        bad=_above("0.5", "grpc_server_handling_seconds", _PREDICTIONS),
        all=_count(f"grpc_server_handling_seconds_count{{{_PREDICTIONS}}}"),
        summary="predictions take more than half a second",
    ),
    Objective(
        name="checkpoints_scored_late",
        alert="UnderstudyScoredLate",
        good=0.95,
        bad=_above("300.0", "understudy_checkpoint_scored_seconds"),
        all=_count("understudy_checkpoint_scored_seconds_count"),
        summary="checkpoints have their scores more than five minutes after they were written",
    ),
    Objective(
        name="checkpoints_served_late",
        alert="UnderstudyServedLate",
        good=0.95,
        bad=_above("300.0", "understudy_checkpoint_served_seconds"),
        all=_count("understudy_checkpoint_served_seconds_count"),
        summary="checkpoints serve more than five minutes after they were written",
    ),
    Objective(
        name="evaluations_failed",
        alert="UnderstudyEvaluationsFail",
        good=0.99,
        bad=_count('understudy_evaluations_total{outcome="failed"}'),
        all=_count('understudy_evaluations_total{outcome=~"failed|scored"}'),
        summary="checkpoints cannot be scored",
    ),
)


def rules() -> dict[str, Any]:
    """Return the content of the rule file."""
    recorded = [
        {
            "record": _recorded(objective, window),
            "expr": f"({objective.bad}) / ({objective.all})".replace("WINDOW", window),
        }
        for objective in OBJECTIVES
        for window in WINDOWS
    ]
    alerts = [
        _alert(objective, suffix, severity, burns)
        for objective in OBJECTIVES
        for suffix, severity, burns in (("Fast", "page", _FAST), ("", "ticket", _SLOW))
    ]
    return {
        "groups": [
            {"name": "understudy-objectives", "rules": recorded},
            {"name": "understudy-budgets", "rules": alerts},
        ]
    }


def _recorded(objective: Objective, window: str) -> str:
    return f"understudy:{objective.name}:ratio_{window}"


def _alert(objective: Objective, suffix: str, severity: str, burns: Sequence[tuple[float, str, str]]) -> dict[str, Any]:
    budget = 1 - objective.good
    conditions = [
        " and ".join(f"{_recorded(objective, window)} > {rate * budget:.6g}" for window in (long, short))
        for rate, long, short in burns
    ]
    name = f"{objective.alert}{suffix}"
    return {
        "alert": name,
        "expr": " or ".join(f"({condition})" for condition in conditions),
        "labels": {"severity": severity},
        "annotations": {
            "summary": f"{_WHERE}: {objective.summary} ({{{{ $value | humanizePercentage }}}} of them; "
            f"{budget:.3g} of all is the budget).",
            "runbook": f"{_RUNBOOK}#{name.lower()}",
        },
    }


@dataclass(frozen=True, kw_only=True)
class Graph:
    """One panel.

    Attributes:
        title: Its title.
        unit: Grafana's name of the unit.
        queries: The queries by their legends; ``JOB`` stands for the selected jobs of the selected namespaces.
        text: What it shows, where the title does not say it.
    """

    title: str
    unit: str
    queries: dict[str, str]
    text: str = ""


def _quantiles(histogram: str, by: str = "", labels: str = "") -> dict[str, str]:
    legend = f"{{{{{by}}}}} " if by else ""
    buckets = f"rate({histogram}_bucket{{JOB{labels}}}[$__rate_interval])"
    summed = f"sum by ({', '.join(filter(None, ('le', by)))}) ({buckets})"
    return {
        f"{legend}p{100 * quantile:g}": f"histogram_quantile({quantile}, {summed}) >= 0" for quantile in (0.5, 0.99)
    }


def _rate(series: str, by: str, labels: str = "") -> str:
    return f"sum by ({by}) (rate({series}{{JOB{labels}}}[$__rate_interval]))"


def _increase(series: str, by: str) -> str:
    return f"sum by ({by}) (increase({series}{{JOB}}[$__rate_interval]))"


def _of(series: str) -> str:
    return f"{series}{{JOB}}"


SERVING = (
    Graph(
        title="Calls",
        unit="reqps",
        queries={"{{grpc_method}}": _rate("grpc_server_handled_total", "grpc_method") + " > 0"},
    ),
    Graph(
        title="Calls that failed",
        unit="reqps",
        queries={
            "{{grpc_method}} {{grpc_code}}": _rate(
                "grpc_server_handled_total", "grpc_method, grpc_code", ',grpc_code!="OK"'
            )
        },
    ),
    Graph(
        title="Duration of predictions",
        unit="s",
        queries=_quantiles("grpc_server_handling_seconds", "grpc_method", f",{_PREDICTIONS}"),
    ),
    Graph(title="Wait in the queue", unit="s", queries=_quantiles("understudy_queue_seconds")),
    Graph(title="Time on the devices", unit="s", queries=_quantiles("understudy_compute_seconds")),
    Graph(title="Examples in a batch", unit="short", queries=_quantiles("understudy_batch_examples")),
    Graph(title="Examples", unit="short", queries={"{{operation}}": _rate("understudy_examples_total", "operation")}),
    Graph(title="Examples waiting", unit="short", queries={"{{instance}}": _of("understudy_queue_examples")}),
    Graph(title="Requests refused", unit="reqps", queries={"{{reason}}": _rate("understudy_rejected_total", "reason")}),
    Graph(
        title="Callers refused", unit="reqps", queries={"{{reason}}": _rate("understudy_refused_calls_total", "reason")}
    ),
    Graph(
        title="Steps",
        unit="short",
        queries={
            "serving": _of("understudy_serving_step"),
            "newest": _of("understudy_latest_step"),
            "best": _of("understudy_best_step"),
        },
    ),
    Graph(
        title="Age of the serving checkpoint",
        unit="s",
        queries={"{{instance}}": _of("understudy_checkpoint_age_seconds")},
    ),
    Graph(
        title="Servers that follow, and are behind",
        unit="short",
        queries={"{{instance}}": _of("understudy_fleet_servers_behind")},
        text="Servers that do not serve what this evaluator decided last.",
    ),
    Graph(title="Memory in use", unit="bytes", queries={"{{device}} {{kind}}": _of("understudy_device_memory_bytes")}),
    Graph(
        title="Functions traced",
        unit="short",
        queries={"{{instance}}": _of("understudy_traces_total")},
        text="Rises while checkpoints are loaded. A rise while only requests are answered is a defect.",
    ),
)

EVALUATION = (
    Graph(
        title="Loss and metrics",
        unit="short",
        queries={"{{dataset}} {{metric}}": _of("understudy_evaluation_metric")},
        text="With other content of a dataset, or another configuration of a metric, a curve ends and another begins.",
    ),
    Graph(title="Step scored last", unit="short", queries={"{{dataset}}": _of("understudy_evaluation_step")}),
    Graph(title="From written to scored", unit="s", queries=_quantiles("understudy_checkpoint_scored_seconds")),
    Graph(title="From written to served", unit="s", queries=_quantiles("understudy_checkpoint_served_seconds")),
    Graph(title="Checkpoints waiting", unit="short", queries={"{{instance}}": _of("understudy_checkpoints_waiting")}),
    Graph(
        title="Scores and decisions",
        unit="short",
        queries={"{{outcome}}": _increase("understudy_evaluations_total", "outcome")},
    ),
    Graph(
        title="Checkpoints loaded",
        unit="short",
        queries={"{{outcome}}": _increase("understudy_checkpoint_loads_total", "outcome")},
    ),
    Graph(
        title="Waiting for the examples of datasets",
        unit="percentunit",
        queries={"{{instance}}": _rate("understudy_evaluation_input_wait_seconds_total", "instance")},
        text="Share of the time. With a slow input pipeline, evaluations wait while nothing is computed for them.",
    ),
    Graph(title="Time to load a checkpoint", unit="s", queries=_quantiles("understudy_checkpoint_load_seconds")),
)

TRAINING = (
    Graph(title="Loss", unit="short", queries={"{{instance}}": _of("understudy_train_loss")}),
    Graph(title="Steps", unit="short", queries={"{{instance}}": _of("understudy_train_steps_total")}),
    Graph(
        title="Examples",
        unit="short",
        queries={"{{instance}}": _of("understudy_train_examples_per_second")},
        text="In a second, over all replicas, since the start.",
    ),
    Graph(
        title="Share of the time spent waiting for input",
        unit="percentunit",
        queries={"{{instance}}": _rate("understudy_train_input_wait_seconds_total", "instance")},
    ),
    Graph(title="Standing still for a checkpoint", unit="s", queries=_quantiles("understudy_train_checkpoint_seconds")),
    Graph(title="Restarts", unit="short", queries={"{{instance}}": _of("understudy_train_restarts")}),
)

DASHBOARDS = {"serving": SERVING, "evaluation": EVALUATION, "training": TRAINING}
_HEIGHT, _WIDTH = 8, 12
_SELECTED = 'namespace=~"$namespace",job=~"$job"'


def _dashboard(name: str, graphs: Sequence[Graph]) -> str:
    series = next(iter(_series(graphs)))
    built = (
        Dashboard(f"Understudy: {name}")
        .uid(f"understudy-{name}")
        .tags(["understudy"])
        .refresh("10s")
        .time("now-1h", "now")
        .readonly()
        .with_variable(dashboard.DatasourceVariable("datasource").type("prometheus").hide(VariableHide.HIDE_LABEL))
        .with_variable(_variable("namespace", of=series))  # outside Kubernetes there is none
        .with_variable(_variable("job", of=f'{series}{{namespace=~"$namespace"}}'))
    )
    for graph in graphs:
        built = built.with_panel(_panel(graph))
    return json.dumps(built.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def _variable(label: str, *, of: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(label)
        .datasource(DataSourceRef(type_val="prometheus", uid="$datasource"))
        .query(f"label_values({of}, {label})")
        .include_all(include_all=True)
        .all_value(".*")
        .multi(multi=True)
    )


def _series(graphs: Sequence[Graph]) -> Iterator[str]:
    """Yield names of series that are queried as they are, so that they have the jobs of a dashboard."""
    for graph in graphs:
        yield from (query.partition("{")[0] for query in graph.queries.values() if query.startswith("understudy_"))


def _panel(graph: Graph) -> timeseries.Panel:
    panel = (
        timeseries.Panel()
        .title(graph.title)
        .unit(graph.unit)
        .datasource(DataSourceRef(type_val="prometheus", uid="$datasource"))
        .height(_HEIGHT)
        .span(_WIDTH)
        .min(0 if graph.unit != "short" else None)  # type: ignore[arg-type] # a loss may be below 0
        .legend(
            common.VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(show_legend=True)
        )
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    )
    if graph.text:
        panel = panel.description(graph.text)
    for index, (legend, query) in enumerate(graph.queries.items()):
        panel = panel.with_target(
            prometheus.Dataquery()
            .expr(query.replace("JOB", _SELECTED))
            .legend_format(legend)
            .ref_id(chr(ord("A") + index))
        )
    return panel


_HEAD = "# Written by tools/monitoring.py (make dashboards).\n"


def files() -> dict[Path, str]:
    """Return the content of every file."""
    written = {_DEPLOY / "prometheus" / "objectives.yml": _HEAD + yaml.safe_dump(rules(), sort_keys=False, width=120)}
    for name, graphs in DASHBOARDS.items():
        written[_DEPLOY / "grafana" / f"{name}.json"] = _dashboard(name, graphs)
    operator = _DEPLOY / "kubernetes" / "components" / "monitoring" / "rules.yaml"
    written[operator] = _HEAD + yaml.safe_dump(_operator_rules(), sort_keys=False, width=120)
    return written


def _operator_rules() -> dict[str, Any]:
    """Return all rules as the resource that the Prometheus operator reads."""
    alerts = yaml.safe_load((_DEPLOY / "prometheus" / "alerts.yml").read_text(encoding="utf-8"))
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "understudy"},
        "spec": {"groups": [*alerts["groups"], *rules()["groups"]]},
    }


def main() -> int:
    """Write or check the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = [
        file for file, content in files().items() if not file.exists() or file.read_text(encoding="utf-8") != content
    ]
    for file in stale:
        if check:
            print(f"{file} differs; run make dashboards", file=sys.stderr)
        else:
            file.write_text(files()[file], encoding="utf-8")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
