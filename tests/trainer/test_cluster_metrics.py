"""What Prometheus scrapes from the tasks of a cluster."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from trainer.rig import BATCH, cluster, free_ports

ENDLESS = ("--steps", "1000000", "--checkpoint-every", "20", "--steps-per-call", "10", "--no-tensorboard")


def scrape(port: int) -> dict[str, float]:
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "le" not in sample.labels
    }


@pytest.mark.parametrize(
    ("strategy", "roles", "training"),
    [("multi_worker", ("chief", "worker"), 2), ("parameter_server", ("chief", "worker", "worker", "ps"), 1)],
)
def test_every_task_that_trains_serves_its_metrics(
    tmp_path: Path, strategy: str, roles: tuple[str, ...], training: int
) -> None:
    ports = free_ports(training)
    environs = [
        {"UNDERSTUDY_METRICS_PORT": str(port), "UNDERSTUDY_RESTART_COUNT": str(index)}
        for index, port in enumerate(ports)
    ]
    with cluster("Noisy", tmp_path, *ENDLESS, roles=roles, strategy=strategy, environs=environs) as tasks:
        for text in ("published step", "published step"):
            tasks[0].wait_for(text)
        scraped = [scrape(port) for port in ports]
    for index, values in enumerate(scraped):
        assert values["understudy_train_steps_total"] >= 20
        assert values["understudy_train_examples_total"] >= 20 * BATCH
        assert values["understudy_train_examples_per_second"] > 0
        assert 0 < values["understudy_train_loss"] < 10
        assert values["understudy_train_checkpoint_seconds_count"] >= 1
        assert values["understudy_train_restarts"] == index
        assert 0 < values["understudy_train_input_wait_seconds_total"] < 60
