"""Messages of a hundred megabytes, both ways."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
from integration.conftest import Run

from testkit.front_ends import FRONT_ENDS
from understudy.checkpoints import CheckpointPublisher, RunDir
from understudy.checkpoints.keras_signature import signature_of
from understudy.checkpoints.layout import MODEL_FILE
from understudy.clients import MessageTooLargeError

pytestmark = pytest.mark.long

WIDTH = 262_144
MIB_PER_ROW = WIDTH * 4 // 2**20
ROWS = 112
BATCH_ROWS = 16
LARGEST_MIB = 128


def publish_identity(run: Path) -> None:
    x = keras.Input((WIDTH,), name="x")
    model = keras.Model(x, keras.layers.Identity(name="y")(x))

    def write(folder: Path) -> None:
        model.save(folder / MODEL_FILE)

    signature = signature_of(model)
    publisher = CheckpointPublisher(RunDir(run), keep=1)
    publisher.publish(1, write, epoch=None, final=False, metrics={}, signature=signature)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_a_message_of_a_hundred_megabytes_goes_both_ways_and_a_larger_one_is_refused(
    run_service: Run, tmp_path: Path
) -> None:
    publish_identity(tmp_path / "run")
    service = run_service({"max_message_mib": LARGEST_MIB}, {"max_batch_size": BATCH_ROWS})
    service.wait_ready()
    client = service.client(max_message_bytes=2 * LARGEST_MIB * 2**20, timeout_seconds=60)
    rows = np.random.default_rng(0).random((ROWS, WIDTH), dtype=np.float32)

    assert np.array_equal(client.predict({"x": rows}).outputs["y"], rows)
    with pytest.raises(MessageTooLargeError, match="larger than max"):
        client.predict({"x": np.zeros((LARGEST_MIB // MIB_PER_ROW, WIDTH), np.float32)})
    assert client.predict({"x": rows[:1]}).step == 1


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_by_default_grpcio_takes_no_message_that_it_would_copy_for_long(
    run_service: Run, tmp_path: Path, front_end: str
) -> None:
    publish_identity(tmp_path / "run")
    service = run_service({}, {"max_batch_size": BATCH_ROWS})
    service.wait_ready()
    client = service.client(timeout_seconds=60)
    rows = np.random.default_rng(0).random((11, WIDTH), dtype=np.float32)

    assert np.array_equal(client.predict({"x": rows[:9]}).outputs["y"], rows[:9])
    if front_end == "grpcio":
        with pytest.raises(MessageTooLargeError, match="send fewer examples at once, or raise"):
            client.predict({"x": rows})
    else:
        assert np.array_equal(client.predict({"x": rows}).outputs["y"], rows)
