"""What two processes save of one model: the evaluator takes the one's checkpoints into the other's slot."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from testkit import saving_script
from testkit.preloading import preloaded
from understudy.checkpoints import ModelKind
from understudy.evaluator.model.loaders import loader_for
from understudy.evaluator.model.slot import Slot

SEEDS = {"first": 1, "second": 2}
TIMEOUT_SECONDS = 200.0
X = np.random.default_rng(5).normal(size=(7, 4)).astype(np.float32)
FILES = {
    "model.keras": ModelKind.KERAS,
    "model.h5": ModelKind.HDF5,
    "model.weights.h5": ModelKind.WEIGHTS,
    "ckpt": ModelKind.TF_CHECKPOINT,
    "exported": ModelKind.SAVED_MODEL,
    "saved": ModelKind.SAVED_MODEL,
}


pytestmark = [pytest.mark.long, pytest.mark.timeout(2 * TIMEOUT_SECONDS)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Have two processes save, one of which has built other models before.

    One starts by itself, so that the memory addresses of their objects differ.
    """
    found = {name: tmp_path_factory.mktemp("saved") / name for name in SEEDS}
    commands = [[str(found[name]), str(seed), str(seed * 2)] for name, seed in SEEDS.items()]
    script = [sys.executable, saving_script.__file__]
    environs: tuple[Mapping[str, str], ...] = ({}, preloaded())
    processes = [
        subprocess.Popen([*script, *command], env={**os.environ, **environ})
        for command, environ in zip(commands, environs, strict=True)
    ]
    assert [process.wait(TIMEOUT_SECONDS) for process in processes] == [0, 0]
    return found


@pytest.mark.parametrize("file", FILES)
def test_the_weights_of_the_second_run_bit_for_bit_in_the_slot_of_the_first(
    file: str, folders: dict[str, Path], logical_cpus: tuple[str, ...]
) -> None:
    loader: Any = loader_for(FILES[file], saving_script.build_model)
    strategy = tf.distribute.MirroredStrategy(list(logical_cpus[:2]))
    assert loader.architecture_of(folders["first"] / file) == loader.architecture_of(folders["second"] / file)
    checkpoint_over, fresh = (
        Slot(strategy, folder / file, max_batch_size=8, loader=loader) for folder in folders.values()
    )
    checkpoint_over.load(folders["second"] / file)

    assert checkpoint_over.signature == fresh.signature
    for name, outputs in fresh.forward({"inputs": X}).items():
        np.testing.assert_array_equal(checkpoint_over.forward({"inputs": X})[name], outputs)
    model = saving_script.build_model()
    saving_script.set_weights(model, SEEDS["second"])
    (outputs,) = fresh.forward({"inputs": X}).values()
    np.testing.assert_allclose(outputs, model(X, training=False), rtol=1e-5)


def test_scores_of_both_go_by_the_same_names(folders: dict[str, Path]) -> None:
    loader = loader_for(ModelKind.KERAS, None)
    names = [
        [metric["config"]["name"] for metric in loader.build(folder / "model.keras").compile_config["metrics"]]
        for folder in folders.values()
    ]

    assert names == [["auc", "recall"]] * 2
