"""Damaged and malicious checkpoints: none is served, none ends the evaluator, and the last good one keeps serving.

An evaluator follows a run folder into which checkpoints are moved that were truncated, have one bit flipped, lack a
file, are deleted while they are read, or are malicious, in all formats; every tenth is good. No malicious one may leave
a file or change a setting of Keras. Meanwhile a thread sends predictions: each answer
must be exactly the number of a checkpoint that was intact when it was read.
"""

from __future__ import annotations

import logging
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import keras
import numpy as np

from soak.malicious_models import HARMS, honest_model, publish_malicious
from soak.numbered import NumberedCheckpoints, ones, save_dataset
from soak.trial import Trial
from understudy.checkpoints import RunDir, RunSource
from understudy.evaluator.datasets.dataset import load_npz
from understudy.evaluator.evaluator import Evaluator
from understudy.evaluator.settings import EvaluatorSettings
from understudy.evaluator.types import EvaluationOutcome, SilentObserver

DAMAGED = 10_000
PER_ROUND = 9

MARKER = "marker"
"""The file that malicious checkpoints would write."""

_WAIT_SECONDS = 120.0
_POLL_SECONDS = 0.02
_LONGEST_LIFE_SECONDS = 0.05


def truncate(checkpoint: Path, chance: random.Random) -> None:
    """Truncate a file."""
    file = chance.choice(sorted(checkpoint.iterdir()))
    content = file.read_bytes()
    file.write_bytes(content[: chance.randrange(len(content))])


def flip_a_bit(checkpoint: Path, chance: random.Random) -> None:
    """Flip one bit of a file."""
    file = chance.choice(sorted(checkpoint.iterdir()))
    content = bytearray(file.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)


def remove_the_model(checkpoint: Path, chance: random.Random) -> None:
    """Delete the model, so that the manifest lists a missing file."""
    del chance
    (checkpoint / "model.keras").unlink()


def delete_soon(checkpoint: Path, chance: random.Random) -> None:
    """Leave it intact; it is deleted after it was moved in."""
    del checkpoint, chance


def be_malicious(checkpoint: Path, chance: random.Random) -> None:
    """Replace it by a malicious one."""
    run, step = RunDir(checkpoint.parent.parent), int(checkpoint.name)
    marker = run.root / MARKER
    shutil.rmtree(checkpoint)
    publish_malicious(run, step, HARMS[chance.choice(sorted(HARMS))], marker)


DAMAGES: tuple[Callable[[Path, random.Random], None], ...] = (
    truncate,
    flip_a_bit,
    remove_the_model,
    delete_soon,
    be_malicious,
)


def run(trial: Trial) -> None:
    """Publish as many damaged checkpoints as the trial says."""
    logging.disable(logging.WARNING)
    count = trial.count(DAMAGED)
    shutil.rmtree(trial.work / "run", ignore_errors=True)
    done: Counter[str] = Counter(trial.load_state().get("done", {}))
    with _DamagedRun(trial.work) as lifecycle:
        while (so_far := sum(done[damage.__name__] for damage in DAMAGES)) < count:
            chance = trial.chance(so_far)
            done.update(lifecycle.play(min(PER_ROUND, count - so_far), chance))
            trial.save_state({"done": dict(done)})
            trial.report(held=not lifecycle.faults, damaged=dict(sorted(done.items())), finished=False)
            if lifecycle.faults:
                break
    trial.report(
        held=not lifecycle.faults,
        damaged=sum(done[damage.__name__] for damage in DAMAGES),
        by_kind={damage.__name__: done[damage.__name__] for damage in DAMAGES},
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
        kinds = [chance.choice(DAMAGES) for _ in range(damaged)]
        steps = {self._publish_damaged(damage, chance): damage for damage in kinds}
        good = self._publish_good()
        self._wait_for(lambda: self._evaluator.serving_step == good, f"step {good} to be served")
        for step, damage in steps.items():
            if damage is not delete_soon:
                self._wait_for(lambda step=step: self._outcomes(step), f"step {step} to be recorded")  # type: ignore[misc]
                if EvaluationOutcome.SCORED in self._outcomes(step):
                    self.faults.append(f"step {step} was scored after {damage.__name__}")
        if (self._beside.root / MARKER).exists():
            self.faults.append("a malicious checkpoint wrote a file")
        if keras.config.epsilon() != self._epsilon:
            self.faults.append("a malicious checkpoint changed a setting of Keras")
        deleted = [step for step, damage in steps.items() if damage is delete_soon]
        counted = Counter(damage.__name__ for damage in kinds)
        counted["good"] = 1
        counted["read_before_deletion"] = sum(EvaluationOutcome.SCORED in self._outcomes(step) for step in deleted)
        counted["predictions"] = self._predictions - before
        return counted

    def _publish_good(self) -> int:
        step = self._next_step()
        self._whole.add(step)
        self._publisher.publish(step)
        self._beside.checkpoint(step).rename(self._run.checkpoint(step))
        return step

    def _publish_damaged(self, damage: Callable[[Path, random.Random], None], chance: random.Random) -> int:
        step = self._next_step()
        if damage is delete_soon:
            self._whole.add(step)
        self._publisher.publish(step)
        damage(self._beside.checkpoint(step), chance)
        self._beside.checkpoint(step).rename(self._run.checkpoint(step))
        if damage is delete_soon:
            time.sleep(chance.uniform(0, _LONGEST_LIFE_SECONDS))
            shutil.rmtree(self._run.checkpoint(step))
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
