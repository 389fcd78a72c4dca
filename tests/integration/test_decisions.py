"""The gate and its decisions, as a client sees them."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import numpy as np
import pytest
from integration.conftest import Run

from testkit.checkpoints import Chief, ones
from testkit.in_process import until
from understudy.checkpoints import MODEL_FILE, RunDir
from understudy.clients import Evaluation, UnavailableError
from understudy.evaluator.serving.promotion import PinFile

pytestmark = pytest.mark.long


def test_a_refused_checkpoint_is_told_with_its_numbers_and_can_be_pinned_all_the_same(
    run_service: Run, chief: Chief, dataset_file: Path
) -> None:
    service = run_service({"eval_data": {"test": dataset_file}}, {"min_improvement": 0.0})
    client = service.client()
    entries: dict[tuple[int, str], Evaluation] = {}
    watch = client.watch_evaluations()
    for step, decision in ((20, "accepted"), (30, "accepted"), (50, "refused")):
        chief.publish(step)
        while (step, decision) not in entries:
            entry = next(watch)
            entries[entry.step, entry.outcome] = entry
    service.wait_ready()

    (refused,) = client.list_evaluations(outcome="refused")
    assert refused == entries[50, "refused"]
    assert refused.metrics["value"] == entries[50, "scored"].metrics["loss"]
    assert refused.metrics["serving_value"] == entries[30, "scored"].metrics["loss"]
    assert "of the serving step 30; 0.0 is required" in refused.reason
    assert [entry.step for entry in client.list_evaluations(outcome="accepted", min_step=25)] == [30]
    status = client.status()
    assert (status.serving_step, status.best_step) == (30, 30)

    assert client.promote(50).serving_step == 50
    assert client.predict({"x": ones(1)}).step == 50
    assert client.roll_back().serving_step == 30
    assert client.predict({"x": ones(1)}).step == 30


@pytest.mark.parametrize(
    ("pinned", "reason"),
    [
        (10, "step 10 is pinned, and its checkpoint is not here; pin another one, or none (promote --unpin)"),
        (None, "version_policy is step 10, and its checkpoint is not here"),
    ],
)
def test_while_the_checkpoint_to_serve_is_not_here_readiness_and_refusals_say_so(
    run_service: Run, chief: Chief, tmp_path: Path, pinned: int | None, reason: str
) -> None:
    (tmp_path / "state").mkdir()
    PinFile(tmp_path / "state").write(pinned)
    chief.publish(20)
    service = run_service({}, {"version_policy": "latest" if pinned else 10})
    client = service.client()
    until(lambda: reason in httpx.get(f"http://{service.http}/readyz").json()["reason"])
    with pytest.raises(UnavailableError, match=re.escape(reason)):
        client.predict({"x": ones(1)}, version="serving")
    chief.publish(10)
    assert service.wait_ready() == 10


@pytest.mark.parametrize("setting", ["run_dir", "checkpoints"])
def test_while_there_is_no_folder_of_checkpoints_readiness_and_refusals_name_it(
    run_service: Run, tmp_path: Path, setting: str
) -> None:
    """The trainer may still create it, or its path is mistyped."""
    folder = tmp_path / "mistyped"
    service = run_service({setting: folder})
    said = f"there is no folder {folder / 'checkpoints' if setting == 'run_dir' else folder} yet"
    until(lambda: said in httpx.get(f"http://{service.http}/readyz").json()["reason"])
    with pytest.raises(UnavailableError, match=re.escape(said)):
        service.client().predict({"x": ones(1)}, version="serving")
    (folder / "checkpoints").mkdir(parents=True)
    until(lambda: "no folder" not in httpx.get(f"http://{service.http}/readyz").json()["reason"])


def test_while_the_only_checkpoint_cannot_be_loaded_readiness_and_refusals_say_why(
    run_service: Run, chief: Chief, tmp_path: Path
) -> None:
    chief.publish(20)
    (RunDir(tmp_path / "run").checkpoint(20) / MODEL_FILE).write_bytes(b"no model")
    service = run_service()
    until(lambda: "step 20 cannot be loaded: " in httpx.get(f"http://{service.http}/readyz").json()["reason"])
    with pytest.raises(UnavailableError, match="no checkpoint is serving yet; step 20 cannot be loaded: "):
        service.client().predict({"x": ones(1)}, version="serving")


def test_while_the_gate_lets_nothing_serve_readiness_says_why(
    run_service: Run, chief: Chief, dataset_file: Path
) -> None:
    service = run_service({"eval_data": {"test": dataset_file}}, {"gate": ("test/loss <= -1",)})
    watch = service.client().watch_evaluations()
    chief.publish(20)
    while (decision := next(watch)).outcome != "refused":
        assert decision.outcome == "scored"

    (condition,) = decision.conditions
    assert (condition.text, condition.outcome, condition.baseline_step) == ("test/loss <= -1", "refused", None)
    ready = httpx.get(f"http://{service.http}/readyz")
    assert ready.status_code == 503
    assert ready.json()["reason"] == f"no checkpoint is serving yet; the gate refused step 20: {decision.reason}"
    assert 'understudy_gate_decisions_total{outcome="refused"} 1.0' in service.client().metrics()
    assert service.client().promote(20).serving_step == 20


def test_while_a_dataset_of_the_gate_cannot_be_scored_readiness_says_so(
    run_service: Run, chief: Chief, dataset_file: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.npz"
    np.savez(other, x=np.zeros((4, 7), np.float32), y=np.zeros((4, 1), np.float32))
    gate = ("test/loss <= 1000", "other/loss <= 1000")
    service = run_service({"eval_data": {"test": dataset_file, "other": other}}, {"gate": gate})
    watch = service.client().watch_evaluations()
    chief.publish(20)
    while (failed := next(watch)).outcome != "failed":
        assert failed.outcome == "scored"

    said = f"the gate cannot decide on step 20, as its evaluation on 'other' failed: {failed.reason}"
    until(
        lambda: (
            httpx.get(f"http://{service.http}/readyz").json()
            == {"ready": False, "reason": f"no checkpoint is serving yet; {said}"}
        )
    )
    with pytest.raises(UnavailableError, match=re.escape(said)):
        service.client().predict({"x": ones(1)}, version="serving")
