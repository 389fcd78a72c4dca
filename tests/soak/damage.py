"""Damaged and malicious checkpoints: none is served, none ends the evaluator, and the last good one keeps serving.

An evaluator follows a run folder into which checkpoints are moved that were truncated, have one bit flipped, lack a
file, are deleted while they are read, are damaged but described as they are, or are malicious, in all formats; every
twentieth is good. No malicious one may leave a file or change a setting of Keras. Meanwhile a thread sends predictions:
each answer must be exactly the number of a checkpoint that was intact when it was read.

Models are saved once: a checkpoint is a copy of a saved one, so that thousands cost minutes.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import keras
import numpy as np
import tensorflow as tf

from soak.malicious import HARMS, describe, honest_model
from soak.numbered import NumberedCheckpoints, ones, save_dataset
from soak.trial import Trial
from understudy.checkpoints import ModelKind, RunDir, RunSource
from understudy.checkpoints.layout import MANIFEST_FILE
from understudy.evaluator.datasets.dataset import load_npz
from understudy.evaluator.evaluator import Evaluator
from understudy.evaluator.observer import SilentObserver
from understudy.evaluator.settings import EvaluatorSettings
from understudy.evaluator.types import EvaluationOutcome

DAMAGED = 10_000
PER_ROUND = 19

MARKER = "marker"
"""The file that malicious checkpoints would write."""

_WAIT_SECONDS = 600.0
_POLL_SECONDS = 0.02
_LONGEST_LIFE_SECONDS = 0.05
_MODEL_FILES = ("model.*", "saved_model/variables/variables.*")
"""The files whose truncation each format can notice by itself."""


class Saved:
    """Checkpoints to copy: honest ones of every format, and malicious ones, each saved when it is first needed.

    Args:
        folder: The folder for them.
        marker: The file that the malicious ones would write.
    """

    def __init__(self, folder: Path, marker: Path) -> None:
        self._folder = folder
        self._marker = marker
        self._malicious: dict[str, Path] = {}
        self._honest: dict[ModelKind, Path] = {}

    def put_honest(self, target: Path, kind: ModelKind) -> None:
        """Copy an honest checkpoint, without a manifest."""
        if kind not in self._honest:
            folder = self._new_folder()
            _SAVE[kind](honest_model(), folder)
            self._honest[kind] = folder
        shutil.copytree(self._honest[kind], target, dirs_exist_ok=True)

    def put_malicious(self, target: Path, name: str) -> None:
        """Copy a malicious checkpoint, without a manifest."""
        if name not in self._malicious:
            folder = self._new_folder()
            HARMS[name].write(folder, self._marker)
            self._malicious[name] = folder
        shutil.copytree(self._malicious[name], target, dirs_exist_ok=True)

    def _new_folder(self) -> Path:
        folder = self._folder / str(len(self._malicious) + len(self._honest))
        folder.mkdir(parents=True)
        return folder


_SAVE: Mapping[ModelKind, Callable[[Any, Path], object]] = {
    ModelKind.KERAS: lambda model, folder: model.save(folder / "model.keras"),
    ModelKind.WEIGHTS: lambda model, folder: model.save_weights(folder / "model.weights.h5"),
    ModelKind.HDF5: lambda model, folder: model.save(folder / "model.h5"),
    ModelKind.TF_CHECKPOINT: lambda model, folder: tf.train.Checkpoint(model).write(str(folder / "model.ckpt")),
    ModelKind.SAVED_MODEL: lambda model, folder: model.export(folder / "saved_model", verbose=False),
}

Damage = Callable[[Path, int, random.Random, Saved], None]
"""Writes a checkpoint of a step into an empty folder, beside those that are followed."""


def _honest(folder: Path, step: int, chance: random.Random, saved: Saved) -> list[Path]:
    """Write an honest checkpoint of some format; return its files."""
    kind = chance.choice(list(ModelKind))
    saved.put_honest(folder, kind)
    describe(folder, step, kind)
    return sorted(path for path in folder.rglob("*") if path.is_file())


def truncate(folder: Path, step: int, chance: random.Random, saved: Saved) -> None:
    """Truncate a file."""
    _cut(chance.choice(_honest(folder, step, chance, saved)), chance)


def flip_a_bit(folder: Path, step: int, chance: random.Random, saved: Saved) -> None:
    """Flip one bit of a file that is not empty."""
    _flip(chance.choice([file for file in _honest(folder, step, chance, saved) if file.stat().st_size]), chance)


def remove_a_file(folder: Path, step: int, chance: random.Random, saved: Saved) -> None:
    """Delete a file that the manifest lists."""
    files = [file for file in _honest(folder, step, chance, saved) if file.name != MANIFEST_FILE]
    chance.choice(files).unlink()


def truncate_and_describe(folder: Path, step: int, chance: random.Random, saved: Saved) -> None:
    """Truncate a file of the model before it is described: only its format can notice."""
    kind = chance.choice(list(ModelKind))
    saved.put_honest(folder, kind)
    _cut(chance.choice(sorted(path for pattern in _MODEL_FILES for path in folder.glob(pattern))), chance)
    describe(folder, step, kind)


def lead_out(folder: Path, step: int, chance: random.Random, saved: Saved) -> None:
    """Replace a file by a symbolic link out of the run, by a pipe, or by a device."""
    file = chance.choice(_honest(folder, step, chance, saved))
    elsewhere = folder.parent.parent / f"elsewhere-{step}"
    file.rename(elsewhere)
    chance.choice((lambda: file.symlink_to(elsewhere), lambda: os.mkfifo(file), lambda: file.symlink_to("/dev/zero")))()


def be_malicious(folder: Path, step: int, chance: random.Random, saved: Saved) -> None:
    """Write a malicious checkpoint."""
    name = chance.choice(sorted(HARMS))
    saved.put_malicious(folder, name)
    describe(folder, step, HARMS[name].kind)


def _cut(file: Path, chance: random.Random) -> None:
    os.truncate(file, chance.randrange(max(1, file.stat().st_size - 1)))  # without its last line break, JSON is whole


def _flip(file: Path, chance: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)


DAMAGES: Mapping[str, Damage | None] = {
    **{
        damage.__name__: damage
        for damage in (truncate, flip_a_bit, remove_a_file, truncate_and_describe, lead_out, be_malicious)
    },
    "delete_soon": None,
}
"""How a checkpoint is damaged. One that is to be deleted soon is intact when it is moved in."""


def run(trial: Trial) -> None:
    """Publish as many damaged checkpoints as the trial says."""
    logging.disable(logging.WARNING)
    count = trial.count(DAMAGED)
    shutil.rmtree(trial.work / "run", ignore_errors=True)
    done: Counter[str] = Counter(trial.load_state().get("done", {}))
    with _DamagedRun(trial.work) as lifecycle:
        while (so_far := sum(done[name] for name in DAMAGES)) < count:
            chance = trial.chance(so_far)
            done.update(lifecycle.play(min(PER_ROUND, count - so_far), chance))
            trial.save_state({"done": dict(done)})
            trial.report(held=not lifecycle.faults, damaged=dict(sorted(done.items())), finished=False)
            if lifecycle.faults:
                break
    trial.report(
        held=not lifecycle.faults,
        damaged=sum(done[name] for name in DAMAGES),
        by_kind={name: done[name] for name in DAMAGES},
        deleted_but_read_before=done["read_before_deletion"],
        good_ones_served=done["good"],
        predictions=done["predictions"],
        faults=lifecycle.faults,
        finished=True,
    )
    if not lifecycle.faults:
        trial.finish()


class _DamagedRun:
    """An evaluator, a client that sends predictions continuously, and an adjacent folder to damage checkpoints in."""

    def __init__(self, work: Path) -> None:
        self.faults: list[str] = []
        self._run = RunDir(work / "run" / "followed")
        self._beside = RunDir(work / "run" / "beside")
        self._run.checkpoints.mkdir(parents=True)
        save_dataset(work / "run" / "test.npz", rows=64)
        settings = EvaluatorSettings(
            state_dir=self._run.evaluator,
            logical_cpus=2,
            poll_interval_seconds=_POLL_SECONDS,
            load_attempts=2,
            load_retry_seconds=_POLL_SECONDS,
            max_batch_size=16,
        )
        self._evaluator = Evaluator(
            settings,
            source=RunSource(self._run),
            datasets=[load_npz("test", work / "run" / "test.npz")],
            observer=SilentObserver(),
            build_model=honest_model,
        )
        self._saved = Saved(work / "run" / "saved", self._beside.root / MARKER)
        self._whole: set[int] = set()
        self._step = 0
        self._epsilon = keras.config.epsilon()
        self._predictions = 0
        self._ended = threading.Event()
        self._asking = threading.Thread(target=self._ask, name="asking")

    def __enter__(self) -> Self:
        self._evaluator.start()
        # Not earlier: the evaluator configures the devices, before anything runs on them.
        self._publisher = NumberedCheckpoints(self._beside)
        self._publish_good()
        if not self._evaluator.wait_ready(_WAIT_SECONDS):
            raise RuntimeError("the evaluator was not ready in time")
        gc.freeze()  # As in a service. Otherwise each failed load looks at every object of the libraries.
        self._asking.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._asking.ident is not None:
            self._asking.join()
        self._evaluator.close()

    def play(self, damaged: int, chance: random.Random) -> Counter[str]:
        """Move damaged checkpoints in, then a good one, and wait until each is recorded; return the damages."""
        before = self._predictions
        kinds = [chance.choice(sorted(DAMAGES)) for _ in range(damaged)]
        steps = {self._publish_damaged(name, chance): name for name in kinds}
        good = self._publish_good()
        self._wait_for(lambda: self._evaluator.serving_step == good, f"step {good} to be served")
        for step, name in steps.items():
            if DAMAGES[name] is not None:
                self._wait_for(lambda step=step: self._outcomes(step), f"step {step} to be recorded ({name})")  # type: ignore[misc]
                if EvaluationOutcome.SCORED in self._outcomes(step):
                    self.faults.append(f"step {step} was scored after {name}")
        if (self._beside.root / MARKER).exists():
            self.faults.append("a malicious checkpoint wrote a file")
        if keras.config.epsilon() != self._epsilon:
            self.faults.append("a malicious checkpoint changed a setting of Keras")
        deleted = [step for step, name in steps.items() if DAMAGES[name] is None]
        counted = Counter(kinds)
        counted["good"] = 1
        counted["read_before_deletion"] = sum(EvaluationOutcome.SCORED in self._outcomes(step) for step in deleted)
        counted["predictions"] = self._predictions - before
        for step in steps:
            shutil.rmtree(self._run.checkpoint(step), ignore_errors=True)
        return counted

    def _publish_good(self) -> int:
        step = self._next_step()
        self._publish_whole(step)
        return step

    def _publish_whole(self, step: int) -> None:
        self._whole.add(step)
        self._publisher.publish(step)
        self._beside.checkpoint(step).rename(self._run.checkpoint(step))

    def _publish_damaged(self, name: str, chance: random.Random) -> int:
        step = self._next_step()
        damage = DAMAGES[name]
        if damage is None:
            self._publish_whole(step)
            time.sleep(chance.uniform(0, _LONGEST_LIFE_SECONDS))
            shutil.rmtree(self._run.checkpoint(step))
            return step
        folder = self._beside.checkpoint(step)
        folder.mkdir()
        damage(folder, step, chance, self._saved)
        folder.rename(self._run.checkpoint(step))
        return step

    def _next_step(self) -> int:
        self._step += 1
        return self._step

    def _outcomes(self, step: int) -> set[EvaluationOutcome]:
        return {record.outcome for record in self._evaluator.ledger.of_step(step)}

    def _wait_for(self, condition: Callable[[], Any], what: str) -> None:
        give_up_at = time.monotonic() + _WAIT_SECONDS
        while not condition():
            if time.monotonic() > give_up_at:
                raise TimeoutError(f"waited {_WAIT_SECONDS:g} s for {what}")
            time.sleep(_POLL_SECONDS)

    def _ask(self) -> None:
        while not self._ended.wait(_POLL_SECONDS / 4):
            try:
                prediction = self._evaluator.predict({"x": ones(3)}).result(_WAIT_SECONDS)
            except Exception as error:  # noqa: BLE001 - whatever a client would have seen is a fault
                self.faults.append(f"a prediction failed: {type(error).__name__}: {error}")
                return
            self._predictions += 1
            if prediction.step not in self._whole or not np.all(prediction.outputs["y"] == prediction.step):
                self.faults.append(f"step {prediction.step} answered {prediction.outputs['y'].ravel()[:3]}")
