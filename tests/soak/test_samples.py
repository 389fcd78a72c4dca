"""A little of what ``make soak`` tries at length, by the same code."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from soak import polls, restarts, swaps
from soak.trial import Trial
from testkit.front_ends import ENVOY, GRPCIO, needs_envoy

ROOT = Path(__file__).parent.parent.parent
TIMEOUT_SECONDS = 280.0
LONG_SECONDS = 360.0


pytestmark = [pytest.mark.long, pytest.mark.usefixtures("quick_starts")]


def soak(topic: str, count: int, folder: Path) -> dict[str, Any]:
    """Try a little of a topic here; return its result."""
    trial = Trial(topic=topic, count=count, seed=0, work=folder / "work", results=folder)
    importlib.import_module(f"soak.{topic}").run(trial)
    return checked(trial.result, folder)


def soak_by_command(topic: str, count: int, folder: Path) -> dict[str, Any]:
    """Try a little of a topic that lays out devices of its own, as ``make soak`` starts it; return its result."""
    options = ("--count", str(count), "--work", str(folder / "work"), "--results", str(folder))
    ended = subprocess.run(
        [sys.executable, "-m", "soak", topic, *options],
        cwd=ROOT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return checked(json.loads((folder / f"soak_{topic}.json").read_text()), folder)


def checked(result: dict[str, Any], folder: Path) -> dict[str, Any]:
    assert result["held"], result
    assert not (folder / "work").exists()
    return result


def test_no_damaged_checkpoint_is_served_and_the_last_good_one_goes_on_serving(tmp_path: Path) -> None:
    result = soak_by_command("damage", 10, tmp_path)

    assert result["damaged"] == 10
    assert result["predictions"] > 0


def test_killed_at_random_the_evaluator_neither_repeats_nor_skips_a_checkpoint(tmp_path: Path) -> None:
    result = soak("kills", 1, tmp_path)

    assert (result["kills"], result["checkpoints"]) == (1, 2)


def test_a_model_that_was_swapped_out_is_not_kept_alive(tmp_path: Path) -> None:
    result = swaps.swap("saved_model", 5, tmp_path)

    assert result["swaps"] == 5
    assert result["most_models_alive"] <= swaps.SLOTS


@needs_envoy
@pytest.mark.timeout(LONG_SECONDS)
def test_no_call_fails_while_servers_restart_in_turn(tmp_path: Path) -> None:
    load = restarts.roll(tmp_path, (GRPCIO, ENVOY), 1)

    assert load.failures == []


@pytest.mark.timeout(LONG_SECONDS)
def test_a_training_comes_to_the_same_bits_though_it_was_killed_and_all_of_it_is_scored(tmp_path: Path) -> None:
    result = soak("training_kills", 1, tmp_path)

    assert result["SIGKILL"] + result["SIGTERM"] == 1
    assert (result["trainings"], result["equal"]) == (1, 1)
    assert result["scored"] == result["published"] > 0


def test_an_evaluator_that_stands_by_takes_over_within_thirty_seconds_and_no_score_is_lost(tmp_path: Path) -> None:
    result = soak("standby", 1, tmp_path)

    assert result["kills"] == 1
    assert result["longest_seconds"] < 30


@needs_envoy
def test_promotions_and_rollbacks_reach_a_fleet_under_load_and_no_answer_fails_or_is_torn(tmp_path: Path) -> None:
    result = soak("fleet", 5, tmp_path)

    assert (result["promotions"], result["servers"], result["failures"]) == (5, 2, [])
    assert result["answers"] > result["answers_through_envoy"] > 0
    assert 0 < result["follower_memory"] < 2  # 1.05 is held by the trial at length, of processes that are no forks
    assert result["evaluator_idle_cpu"] < result["alone_idle_cpu"] + 1


def test_polls_and_passes_are_measured_in_every_state_of_the_run_folder() -> None:
    figures = polls.measure(20)
    assert figures["checkpoints"] == 20
    assert figures["pass_after_publication_us"] > figures["poll_us"] > 0
    assert {*polls.CONSTANT, "first_passes_us_per_checkpoint", "poll_with_one_not_committed_us"} <= figures.keys()
