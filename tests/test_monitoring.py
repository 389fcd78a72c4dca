"""The alerts: each fires on what it is about, is silent otherwise, and has a section in the docs."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from testkit.prometheus_tools import tool

pytestmark = pytest.mark.long

ROOT = Path(__file__).parent.parent
RULE_FILES = [ROOT / "deploy" / "prometheus" / name for name in ("alerts.yml", "objectives.yml")]

FLAT = "1+0x600"
"""What a counter does without events in ten hours."""

CALLS = 'grpc_server_handled_total{job="understudy",grpc_service="understudy.v1.PredictionService",grpc_code="%s"}'
PREDICT = 'job="understudy",grpc_type="unary",grpc_method="Predict"'


def good_and_bad(good: str, bad: str) -> dict[str, dict[str, str]]:
    """Return the series that do not fire and that do: events of one kind each minute."""
    return {"silent": {good: "0+100x600", bad: FLAT}, "firing": {good: FLAT, bad: "0+100x600"}}


def timely_and_late(histogram: str, labels: str = "", bound: str = "300.0") -> dict[str, dict[str, str]]:
    """Return the series of a histogram with 100 events a minute, within the bound or not."""
    joined = f"{labels}," if labels else ""
    count, bucket = f"{histogram}_count{{{labels}}}", f'{histogram}_bucket{{{joined}le="{bound}"}}'
    return {"silent": {count: "0+100x600", bucket: "0+100x600"}, "firing": {count: "0+100x600", bucket: FLAT}}


BUDGETS = {
    "UnderstudyCallsFail": good_and_bad(CALLS % "OK", CALLS % "Internal"),
    "UnderstudyPredictionsSlow": timely_and_late("grpc_server_handling_seconds", PREDICT, "0.5"),
    "UnderstudyScoredLate": timely_and_late("understudy_checkpoint_scored_seconds"),
    "UnderstudyServedLate": timely_and_late("understudy_checkpoint_served_seconds"),
    "UnderstudyEvaluationsFail": good_and_bad(
        'understudy_evaluations_total{outcome="scored"}', 'understudy_evaluations_total{outcome="failed"}'
    ),
}
CAUSES = {
    "UnderstudyDown": {"silent": {'up{job="understudy"}': "1x600"}, "firing": {'up{job="understudy"}': "0x600"}},
    "UnderstudyCheckpointFailed": good_and_bad(
        'understudy_checkpoint_loads_total{outcome="loaded"}', 'understudy_checkpoint_loads_total{outcome="failed"}'
    ),
    "UnderstudyServesAnOldCheckpoint": {
        "silent": {"understudy_latest_step": "20x600", "understudy_serving_step": "20x600"},
        "firing": {"understudy_latest_step": "20x600", "understudy_serving_step": "10x600"},
    },
    "UnderstudyOverloaded": good_and_bad(
        'understudy_rejected_total{reason="invalid"}', 'understudy_rejected_total{reason="queue_full"}'
    ),
    "UnderstudyEvaluationStands": {
        "silent": {
            'understudy_checkpoints_waiting{instance="a"}': "5x600",
            'understudy_evaluations_total{instance="a",outcome="scored"}': "0+1x600",
        },
        "firing": {
            'understudy_checkpoints_waiting{instance="a"}': "5x600",
            'understudy_evaluations_total{instance="a",outcome="scored"}': FLAT,
        },
    },
    "UnderstudySourceFails": {
        "silent": {'understudy_source_failures{instance="a"}': "1 0 2 0x600"},
        "firing": {'understudy_source_failures{instance="a"}': "1+1x600"},
    },
    "UnderstudyGpuMemoryErrors": good_and_bad(
        'understudy_device_ecc_errors_total{kind="corrected"}', 'understudy_device_ecc_errors_total{kind="uncorrected"}'
    ),
    "UnderstudyDrift": {
        "silent": {
            'understudy_drift{instance="a",statistic="psi"}': "0.3x600",
            'understudy_drift_examples{instance="a"}': "900x600",
        },
        "firing": {
            'understudy_drift{instance="a",statistic="psi"}': "0.3x600",
            'understudy_drift_examples{instance="a"}': "2000x600",
        },
    },
    "UnderstudyRequestLogLosesRequests": good_and_bad(
        'understudy_request_log_dropped_total{reason="queue"}', 'understudy_request_log_dropped_total{reason="disk"}'
    ),
    "UnderstudyEventsStand": {
        "silent": {
            'understudy_events_waiting{instance="a",destination="b"}': "5x600",
            'understudy_events_sent_total{instance="a",destination="b"}': "0+1x600",
        },
        "firing": {
            'understudy_events_waiting{instance="a",destination="b"}': "5x600",
            'understudy_events_sent_total{instance="a",destination="b"}': FLAT,
        },
    },
    "UnderstudyDeadLetters": {
        "silent": {
            'understudy_events_dead{instance="a",destination="b"}': "0x600",
            'understudy_events_dropped_total{instance="a",destination="b"}': "5x600",
        },
        "firing": {
            'understudy_events_dead{instance="a",destination="b"}': "0x600",
            'understudy_events_dropped_total{instance="a",destination="b"}': "0+1x600",
        },
    },
    "UnderstudyServersBehind": {
        "silent": {'understudy_fleet_servers_behind{instance="a"}': "1 0 0x600"},
        "firing": {'understudy_fleet_servers_behind{instance="a"}': "1x600"},
    },
    "UnderstudyDoesNotFollow": {
        "silent": {'understudy_following{instance="a"}': "0x5 1x595"},
        "firing": {'understudy_following{instance="a"}': "0x600"},
    },
    "UnderstudyRolloutWentBack": good_and_bad(
        'understudy_evaluations_total{outcome="rollout_promoted"}',
        'understudy_evaluations_total{outcome="rollout_rolled_back"}',
    ),
    "UnderstudyFilesNotReloaded": {
        "silent": {'understudy_last_reload_successful{instance="a",files="callers"}': "0x5 1x595"},
        "firing": {'understudy_last_reload_successful{instance="a",files="callers"}': "0x600"},
    },
    "UnderstudyClusterFails": {
        "silent": {'understudy_cluster_failures_total{instance="a"}': "0+1x2 2x598"},
        "firing": {'understudy_cluster_failures_total{instance="a"}': "0+1x600"},
    },
    **BUDGETS,
}
"""For each alert, series of ten hours during which it is silent, and during which it fires. A budget has two alerts."""


SHARED_JOB = {"good": 100_000, "bad": 10}
"""Calls in a minute in two namespaces, whose pods have the same job."""


def alerts() -> dict[str, dict[str, Any]]:
    """Return every alert of the rule files by name."""
    groups = [group for file in RULE_FILES for group in yaml.safe_load(file.read_text(encoding="utf-8"))["groups"]]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def check_rules(folder: Path, checks: list[dict[str, Any]]) -> None:
    """Let promtool compare the alerts that fire with those that should."""
    content = {"rule_files": [str(rules) for rules in RULE_FILES], "evaluation_interval": "5m", "tests": checks}
    file = folder / "checks.yml"
    file.write_text(json.dumps(content), encoding="utf-8")
    ran = subprocess.run(
        [tool("promtool"), "test", "rules", file], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ran.returncode, "SUCCESS" in ran.stdout) == (0, True), ran.stdout + ran.stderr


def firing(series: dict[str, str], *, at: str, fire: Iterable[str]) -> dict[str, Any]:
    """Return a check that exactly these alerts fire at a time."""
    expected = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in fire]
    query = 'count by (alertname) (ALERTS{alertstate="firing"})'
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [{"expr": query, "eval_time": at, "exp_samples": expected}],
    }


def test_each_alert_fires_on_its_cause_and_no_other(tmp_path: Path) -> None:
    check_rules(
        tmp_path,
        [
            firing(given["firing"], at="9h", fire=(name, f"{name}Fast") if name in BUDGETS else (name,))
            for name, given in CAUSES.items()
        ],
    )


def test_no_alert_fires_while_all_is_well(tmp_path: Path) -> None:
    series = [series for given in CAUSES.values() for series in given["silent"].items()]
    assert len(series) == len(dict(series))
    check_rules(tmp_path, [firing(dict(series), at="9h", fire=())])


def test_an_error_budget_has_room_for_twice_the_even_rate_for_half_an_hour(tmp_path: Path) -> None:
    series = {CALLS % "OK": "0+998x600", CALLS % "Internal": "0+0x570 0+2x30"}
    check_rules(tmp_path, [firing(series, at="10h", fire=())])


def test_a_namespace_in_which_calls_fail_is_not_hidden_by_another_one(tmp_path: Path) -> None:
    calls = {"good": CALLS % "OK", "bad": CALLS % "Internal"}
    series = {calls[name].replace("{", f'{{namespace="{name}",'): f"0+{rate}x600" for name, rate in SHARED_JOB.items()}
    check_rules(tmp_path, [firing(series, at="9h", fire=("UnderstudyCallsFail", "UnderstudyCallsFailFast"))])


def test_each_alert_names_its_section_of_the_docs() -> None:
    found = alerts()
    assert found.keys() == CAUSES.keys() | {f"{name}Fast" for name in BUDGETS}
    for name, rule in found.items():
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        headings = re.findall(r"^## (.*)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
        assert name in headings
        assert anchor == name.lower()
