"""An evaluator finds settings for the model that it serves, and the next one starts with them."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from testkit.checkpoints import Chief, ones
from testkit.in_process import until
from testkit.real_run import WAIT_SECONDS
from understudy.evaluator.assembly import serving_parts
from understudy.evaluator.evaluator import Evaluator
from understudy.evaluator.factory import create_evaluator
from understudy.evaluator.observer import SilentObserver
from understudy.evaluator.settings import DEFAULT_MAX_BATCH_SIZE, CheckpointLocation, EvaluatorSettings
from understudy.evaluator.tuning import self_tuner
from understudy.evaluator.tuning.tuning_file import TUNING_FILE

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("logical_cpus")]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    Chief(tmp_path).publish(3)
    return tmp_path


@pytest.fixture
def one_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin at once, and try only the threads that are in use, on a machine that may be busy."""
    monkeypatch.setattr(serving_parts, "TUNING_SETTLING_SECONDS", 0.0)
    monkeypatch.setattr(self_tuner, "usable_cores", lambda: 1)


def create(run: Path, **settings: object) -> Evaluator:
    location = CheckpointLocation(folder=run, is_run=True)
    chosen = {"state_dir": run / "state", "devices": ("CPU:0",), **settings}
    return create_evaluator(location, EvaluatorSettings(**chosen), SilentObserver()).evaluator  # type: ignore[arg-type]


@pytest.mark.usefixtures("one_trial")
def test_what_is_found_for_a_model_is_in_effect_at_once_and_after_a_restart(run: Path) -> None:
    file = run / "state" / TUNING_FILE
    with create(run) as first:
        assert first.wait_ready(WAIT_SECONDS)
        assert first.max_batch_size == DEFAULT_MAX_BATCH_SIZE
        before = first.predict({"x": ones(3)}).result(WAIT_SECONDS).outputs["y"]
        until(file.exists)
        document = json.loads(file.read_bytes())
        (entry,) = document["found"]
        until(lambda: first.max_batch_size == entry["max_batch_size"])
        assert (first.predict({"x": ones(3)}).result(WAIT_SECONDS).outputs["y"] == before).all()
    entry["max_batch_size"] = 77
    file.write_text(json.dumps(document | {"found": [entry]}), encoding="utf-8")

    with create(run) as second:
        assert second.max_batch_size == 77
    with create(run, max_batch_size=5) as chosen_by_hand:
        assert chosen_by_hand.max_batch_size == 5
    with create(run, self_tuning=False) as without:
        assert without.max_batch_size == DEFAULT_MAX_BATCH_SIZE


@pytest.mark.usefixtures("one_trial")
def test_an_evaluator_that_closes_ends_its_trial(run: Path) -> None:
    with create(run) as evaluator:
        until(lambda: any(thread.name == "understudy-trial" for thread in threading.enumerate()))
    assert not [thread for thread in threading.enumerate() if thread.name in ("understudy-trial", "understudy-tune")]
    assert evaluator is not None
    assert not (run / "state" / TUNING_FILE).exists()
