"""Live drift against a reference, with a model and a clock that tests control."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from understudy.checkpoints.signature import Signature, TensorSpec
from understudy.evaluator.datasets.dataset import ArrayDataset
from understudy.evaluator.datasets.request_records import LoggedRequest
from understudy.evaluator.evaluation.drift_monitor import COMPUTE_SECONDS, DriftMonitor, DriftOptions, LiveDrift
from understudy.evaluator.evaluator_errors import OverloadedError
from understudy.evaluator.types import Array, Arrays, ModelDescription, Prediction, Version

REFERENCE = np.random.default_rng(2).normal(size=(400, 2)).astype(np.float32)
HOUR_SECONDS = 3600.0

SIGNATURE = Signature(
    inputs=(
        TensorSpec(name="x", dtype="float32", shape=(None, 2)),
        TensorSpec(name="user", dtype="string", shape=(None,)),
    ),
    outputs=(TensorSpec(name="y", dtype="float32", shape=(None, 2)),),
)


def outputs_of(x: Array, step: int) -> Arrays:
    return {"y": np.stack([x[:, 0] * step, x[:, 1]], axis=1)}


def users(count: int, name: bytes = b"ann") -> Array:
    return np.array([name] * count, object)


class Model:
    """Multiplies the first input by its step."""

    def __init__(self) -> None:
        self.serving_step: int | None = None
        self.busy = False

    def metadata(self, version: Version = "serving") -> ModelDescription:
        assert isinstance(version, int)
        return ModelDescription(step=version, signature=SIGNATURE, replicas=1, devices=(), datasets=())

    def predict(self, inputs: Arrays, *, version: Version = "serving") -> Future[Prediction]:
        if self.busy:
            raise OverloadedError("the queue is full")
        assert isinstance(version, int)
        future: Future[Prediction] = Future()
        future.set_result(Prediction(outputs=outputs_of(inputs["x"], version), step=version))
        return future


class Live:
    """A monitor, and what it computed."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.model = Model()
        self.found: list[LiveDrift] = []
        self.file = folder / "drift.json"
        self.now = 1000.0
        chosen = {"file": self.file, "window_seconds": HOUR_SECONDS, "max_features": 8, **options}
        arrays = {"x": REFERENCE, "user": users(len(REFERENCE)), "y": REFERENCE}
        self.monitor = DriftMonitor(
            self.model,
            ArrayDataset("test", arrays),
            DriftOptions(**chosen),
            on_computed=self.found.append,
            clock=lambda: self.now,
        )

    def receive(self, x: Array, *, step: int = 1, user: bytes = b"ann") -> None:
        self.monitor.take(
            LoggedRequest(
                inputs={"x": x, "user": users(len(x), user)},
                outputs=outputs_of(x, step),
                step=step,
                recorded_at=self.now,
                method="",
                caller="",
            )
        )

    def tick(self, seconds: float = COMPUTE_SECONDS) -> None:
        self.now += seconds
        self.monitor.tick()

    def psi(self) -> dict[tuple[str, str], float]:
        found = self.found[-1]
        return {(each.kind, each.name): each.psi for each in (*found.inputs.features, *found.scores.features)}


@pytest.fixture
def live(tmp_path: Path) -> Live:
    return Live(tmp_path)


def test_the_same_distribution_does_not_drift(live: Live) -> None:
    live.model.serving_step = 1
    live.tick()
    live.receive(REFERENCE)
    live.tick()
    assert live.found[-1].examples == len(REFERENCE)
    assert live.psi().keys() == {
        ("input", "x[0]"),
        ("input", "x[1]"),
        ("input", "user"),
        ("score", "y[0]"),
        ("score", "y[1]"),
        ("class", "y"),
    }
    assert max(live.psi().values()) == pytest.approx(0, abs=1e-9)


def test_what_drifted_is_named_and_in_the_file(live: Live) -> None:
    live.model.serving_step = 1
    live.tick()
    live.receive(REFERENCE + np.array([0, 3], np.float32))
    live.tick()
    drifted = {name for name, psi in live.psi().items() if psi > 0.25}
    assert drifted == {("input", "x[1]"), ("score", "y[1]"), ("class", "y")}
    written = json.loads(live.file.read_text())
    assert (written["dataset"], written["step"], written["examples"]) == ("test", 1, len(REFERENCE))
    assert written["inputs"]["features"][0]["name"] == "x[1]"


def test_nothing_is_computed_before_a_version_serves_or_a_request_comes(live: Live) -> None:
    live.receive(REFERENCE)
    live.tick()
    live.model.serving_step = 1
    live.tick()
    live.tick()
    assert live.found == []


def test_outputs_are_compared_with_those_of_the_version_that_serves(live: Live) -> None:
    live.model.serving_step = 1
    live.tick()
    live.receive(REFERENCE, step=1)
    live.model.serving_step = 5
    live.tick()
    live.receive(REFERENCE, step=1)  # an answer of the version before
    live.receive(REFERENCE, step=5)
    live.tick()
    assert (live.found[-1].step, live.found[-1].examples) == (5, 3 * len(REFERENCE))
    assert live.psi()["score", "y[0]"] == pytest.approx(0, abs=1e-9)
    (score,) = [each for each in live.found[-1].scores.features if each.name == "y[0]"]
    assert score.count == len(REFERENCE)


def test_examples_leave_the_window(live: Live) -> None:
    live.model.serving_step = 1
    live.tick()
    live.receive(REFERENCE + 9)
    live.tick()
    assert live.psi()["input", "x[0]"] > 1
    for _ in range(2):
        live.tick(HOUR_SECONDS / 2)
    live.receive(REFERENCE)
    live.tick()
    assert live.found[-1].examples == len(REFERENCE)
    assert live.psi()["input", "x[0]"] == pytest.approx(0, abs=1e-9)


def test_a_busy_device_delays_the_reference(live: Live) -> None:
    live.model.serving_step, live.model.busy = 1, True
    live.tick()
    live.receive(REFERENCE)
    live.model.busy = False
    live.tick(COMPUTE_SECONDS / 2)  # not at every tick
    live.receive(REFERENCE)
    live.tick()
    live.receive(REFERENCE[:10])
    live.tick()
    assert live.found[-1].examples == 10


def test_redacted_inputs_are_left_out(tmp_path: Path) -> None:
    live = Live(tmp_path, without=("user",))
    live.model.serving_step = 1
    live.tick()
    live.receive(REFERENCE, user=b"secret")
    live.tick()
    assert ("input", "user") not in live.psi()
    assert "secret" not in live.file.read_text()
    assert "ann" not in live.file.read_text()


def test_features_are_bounded(tmp_path: Path) -> None:
    live = Live(tmp_path, max_features=1)
    live.model.serving_step = 1
    live.tick()
    live.receive(REFERENCE)
    live.tick()
    assert live.psi().keys() == {("input", "user"), ("class", "y")}
