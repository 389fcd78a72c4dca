"""A whole server beside whose good checkpoints somebody puts malicious ones."""

from __future__ import annotations

import shutil
from pathlib import Path

import keras
import numpy as np
import pytest
from integration.conftest import Run

from soak.malicious import HARMS, publish_malicious
from testkit.checkpoints import OUTPUTS, Chief, ones, step_model
from testkit.in_process import RunningService, until
from understudy.checkpoints.layout import RunDir

IN_A_RUN = (
    "set_epsilon as an activation",
    "a Lambda layer",
    "an archive that expands to 300 MiB",
    "a link to another file, in .keras",
    "a Lambda layer in .h5 (CVE-2025-9905)",
    "a SavedModel that writes a file",
)


def reason_of(service: RunningService, step: int) -> str:
    """Wait until a checkpoint is recorded; return why it failed."""
    client = service.client()

    def recorded() -> list[str]:
        return [entry.reason for entry in client.list_evaluations() if entry.step == step]

    until(lambda: bool(recorded()))
    return recorded()[0]


def test_malicious_checkpoints_of_a_run_are_refused_for_what_they_are_and_the_good_one_keeps_serving(
    run_service: Run, chief: Chief, tmp_path: Path
) -> None:
    epsilon, marker = keras.config.epsilon(), tmp_path / "marker"
    chief.publish(1)
    service = run_service(evaluator={"load_attempts": 2, "load_retry_seconds": 0.05})
    assert service.wait_ready() == 1

    for step, name in enumerate(IN_A_RUN, start=2):
        publish_malicious(RunDir(tmp_path / "run"), step, HARMS[name], marker)
    reasons = {name: reason_of(service, step) for step, name in enumerate(IN_A_RUN, start=2)}

    assert "--allow-unsafe-models" in reasons["set_epsilon as an activation"]
    assert "keras.config.set_epsilon" in reasons["set_epsilon as an activation"]
    assert "Lambda" in reasons["a Lambda layer"]
    assert "would expand" in reasons["an archive that expands to 300 MiB"]
    assert "is a link to another file" in reasons["a link to another file, in .keras"]
    assert "Lambda" in reasons["a Lambda layer in .h5 (CVE-2025-9905)"]
    assert "WriteFile" in reasons["a SavedModel that writes a file"]
    assert not marker.exists()
    assert keras.config.epsilon() == epsilon
    client = service.client()
    assert client.predict(ones(2)).step == 1
    chief.publish(20)
    until(lambda: client.predict(ones(2)).step == 20)


def test_malicious_checkpoints_of_another_program_are_refused(run_service: Run, tmp_path: Path) -> None:
    epsilon, theirs = keras.config.epsilon(), tmp_path / "theirs"
    theirs.mkdir()
    step_model(1).save(theirs / "model-1.keras")
    service = run_service({"checkpoints": theirs}, {"load_attempts": 1})
    assert service.wait_ready() == 1

    made = tmp_path / "made"
    made.mkdir()
    HARMS["set_epsilon as a metric"].write(made, tmp_path / "marker")
    shutil.move(made / "model.keras", theirs / "model-2.keras")

    assert "keras.config.set_epsilon" in reason_of(service, 2)
    assert keras.config.epsilon() == epsilon
    np.testing.assert_allclose(service.client().predict(ones(1)).output, np.full((1, OUTPUTS), 1), rtol=1e-6)


@pytest.mark.parametrize("allowed", [False, True])
def test_a_saved_model_that_reads_a_file_is_served_only_if_that_is_allowed(
    run_service: Run, tmp_path: Path, *, allowed: bool
) -> None:
    folder, marker = tmp_path / "theirs", tmp_path / "marker"
    folder.mkdir()
    step_model(1).export(folder / "1", verbose=False)
    HARMS["a SavedModel that writes a file"].write(tmp_path, marker)
    service = run_service({"checkpoints": folder}, {"load_attempts": 1, "allow_unsafe_models": allowed})
    assert service.wait_ready() == 1

    shutil.move(tmp_path / "saved_model", folder / "2")

    if allowed:
        until(marker.exists)  # loading runs the model once
    else:
        assert "WriteFile" in reason_of(service, 2)
        assert not marker.exists()
