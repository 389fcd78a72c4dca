"""A stock ``ModelCheckpoint`` at full speed, and a reader at full speed: no torn read, and the writer undisturbed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import h5py
import numpy as np

from testkit.polling import polled
from testkit.preloading import preloaded
from understudy.checkpoints import CheckpointGoneError, FolderSource

_WRITER = """
import json, sys, threading
import keras
import numpy as np

model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(512, use_bias=False, name="dense")])
model.compile(optimizer="sgd", loss="mse")
callback = keras.callbacks.ModelCheckpoint(sys.argv[1] + "/model.keras")
callback.set_model(model)
stop = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
saves, failures = 0, []
print("writing", flush=True)
while not stop.is_set():
    saves += 1
    model.layers[0].set_weights([np.full((256, 512), saves, np.float32)])
    model.optimizer.iterations.assign(saves)
    try:
        callback.on_epoch_end(saves, {})
    except Exception as error:
        failures.append(repr(error))
print(json.dumps({"saves": saves, "failures": failures}), flush=True)
"""

_READ = 10
"""So many checkpoints are read while the writer goes on."""
_PATIENCE_SECONDS = 50.0


def _weights(model_file: Path) -> np.ndarray:
    with zipfile.ZipFile(model_file) as archive, archive.open("model.weights.h5") as member, h5py.File(member) as file:
        return np.asarray(file["layers/dense/vars/0"])


def test_reading_at_full_speed_tears_nothing_and_disturbs_nobody(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    source = FolderSource(folder, tmp_path / "staging")
    seen: dict[int, str] = {}
    command = [sys.executable, "-c", _WRITER, str(folder)]
    environment = {**os.environ, **preloaded(), "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "writing\n"
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while len(seen) < _READ and time.monotonic() < deadline:
            for checkpoint in polled(source):
                if checkpoint.step in seen:
                    continue
                try:
                    local = checkpoint.fetch(tmp_path / "pinned" / str(checkpoint.step))
                except CheckpointGoneError:
                    continue
                assert np.all(_weights(local.model_file) == checkpoint.step)
                seen[checkpoint.step] = checkpoint.digest
                local.release()
        report = json.loads(writer.communicate(timeout=30)[0])
    assert report["failures"] == []
    assert report["saves"] > len(seen)
    assert len(seen) >= _READ
    assert list(seen) == sorted(seen)
    assert len(set(seen.values())) == len(seen)
