"""What Prometheus scrapes from the tasks of a cluster."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from testkit import training_files as files
from testkit.in_process import until
from testkit.ports import free_ports
from testkit.prometheus_tools import dashboard_queries, scraping, value_of
from testkit.training_harness import BATCH, cluster

pytestmark = pytest.mark.long

ENDLESS = ("--steps", "1000000", "--checkpoint-every", "20", "--steps-per-call", "10", "--no-tensorboard")


def scrape(port: int) -> dict[str, float]:
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=60).text
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "le" not in sample.labels
    }


@pytest.mark.parametrize(
    ("strategy", "roles", "experiment"),
    [
        ("multi_worker", ("chief", "worker"), "Noisy"),
        ("parameter_server", ("chief", "worker", "ps"), f"{files.__file__}:NoisyRecords"),
    ],
)
def test_every_task_that_trains_serves_its_metrics(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    strategy: str,
    roles: tuple[str, ...],
    experiment: str,
) -> None:
    files.write_files(tmp_path)
    monkeypatch.setenv(files.FOLDER, str(tmp_path))
    ports = free_ports(len(roles) if strategy == "multi_worker" else 1)
    environs = [
        {"UNDERSTUDY_METRICS_PORT": str(port), "UNDERSTUDY_RESTART_COUNT": str(index)}
        for index, port in enumerate(ports)
    ]
    with (
        scraping(f"127.0.0.1:{ports[0]}", tmp_path) as prometheus,
        cluster(experiment, tmp_path / "run", *ENDLESS, roles=roles, strategy=strategy, environs=environs) as tasks,
    ):
        for text in ("published step", "published step"):
            tasks[0].wait_for(text)
        assert "  accuracy 0." in tasks[0].lines[-1]
        scraped = [scrape(port) for port in ports]
        queries = dashboard_queries("training")
        until(lambda: all(value_of(prometheus, query) is not None for query in queries))
    for index, values in enumerate(scraped):
        assert values["understudy_train_steps_total"] >= 20
        assert values["understudy_train_examples_total"] >= 20 * BATCH
        assert values["understudy_train_examples_per_second"] > 0
        assert 0 < values["understudy_train_loss"] < 10
        assert values["understudy_train_checkpoint_seconds_count"] >= 1
        assert values["understudy_train_restarts"] == index
        assert 0 < values["understudy_train_input_wait_seconds_total"] < 60
