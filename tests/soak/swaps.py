"""Swap after swap in every format, and to another architecture each time: memory stays flat.

Each case runs in its own process, with an evaluator on a folder into which one checkpoint after another is copied.
Each load replaces an earlier model. Each version is frozen before the next is published, whatever it gains. The
evaluator must hold no more models than it has slots, and its resident memory must not drift between a settling period
and the end.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from soak.trial import Trial
from testkit.living import living

if TYPE_CHECKING:
    from understudy.evaluator.evaluator import Evaluator

SWAPS = 200
SETTLED = 50
MAX_DRIFT = 0.01
SAMPLES = 10
"""The memory after settling and at the end is the median after this many swaps: one sample varies by more than 1 %."""
SLOTS = 3
WAIT_SECONDS = 120.0
FEATURES = 64
WIDTHS = (256, 240, 224, 208)
LAYERS = 4
ARCHITECTURES = len(WIDTHS) ** LAYERS

NAMES = {
    "keras": "model-{step}.keras",
    "h5": "model-{step}.h5",
    "weights": "model-{step}.weights.h5",
    "checkpoint": "at-{step}",
    "saved_model": "{step}",
    "changing_architecture": "changed-{step}.keras",
}
"""The cases, and the name of a checkpoint in each: the formats, and Keras files no two of which compute the same."""


def run(trial: Trial) -> None:
    """Try every case that is not done yet."""
    count = trial.count(SWAPS)
    found: dict[str, Any] = trial.load_state()
    for form in [form for form in NAMES if form not in found]:
        program = [sys.executable, "-m", "soak.swaps", form, str(count)]
        done = subprocess.run(program, stdout=subprocess.PIPE, text=True, check=True)
        found[form] = json.loads(done.stdout.splitlines()[-1])
        trial.save_state(found)
        trial.report(
            held=all(map(_held, found.values())),
            swaps_of_each=count,
            settled_after=min(SETTLED, count // 4),
            max_drift=MAX_DRIFT,
            formats=found,
        )
    trial.finish()


def _held(figures: dict[str, Any]) -> bool:
    return bool(figures["drift"] <= MAX_DRIFT and figures["most_models_alive"] <= SLOTS)


def swap(form: str, count: int, folder: Path) -> dict[str, Any]:
    """Swap this often in this process; return the memory samples."""
    import keras

    made = _make(form, count, folder / "made")
    alive, resident = [], []
    with living(keras.Model) as models:
        for _ in _swaps(made, folder):
            alive.append(len(models))
            resident.append(_resident_megabytes())
    samples = min(SAMPLES, count // 4)
    settled = statistics.median(resident[min(SETTLED, count // 4) :][:samples])
    final = statistics.median(resident[-samples:])
    return {
        "swaps": len(resident),
        "most_models_alive": max(alive),
        "settled_megabytes": round(settled, 1),
        "final_megabytes": round(final, 1),
        "drift": round(final / settled - 1, 4),
    }


def _swaps(made: list[Path], folder: Path) -> Iterator[None]:
    """Yield after each swap."""
    import numpy as np

    from understudy.checkpoints import FolderSource
    from understudy.evaluator.evaluator import Evaluator
    from understudy.evaluator.observer import SilentObserver
    from understudy.evaluator.settings import EvaluatorSettings

    state, theirs = folder / "state", folder / "theirs"
    theirs.mkdir()
    evaluator = Evaluator(
        EvaluatorSettings(state_dir=state, devices=("CPU:0",), poll_interval_seconds=0.05, slots=SLOTS),
        source=FolderSource(theirs, state / "staging", takes_variables=True),
        build_model=lambda: _model(1.0),
        observer=SilentObserver(),
    )
    gc.collect()
    gc.freeze()
    with _freezing_at_once(), evaluator:
        for step, path in enumerate(made, start=1):
            _publish(path, theirs / path.name)
            _wait_until_serving(evaluator, step)
            _wait_until_frozen(evaluator)
            evaluator.predict({"x": np.ones((3, FEATURES), np.float32)}).result(WAIT_SECONDS)
            yield


def _make(form: str, count: int, folder: Path) -> list[Path]:
    """Save this many checkpoints, no two of which are equal: an equal one is no new version."""
    import keras
    import tensorflow as tf

    folder.mkdir(parents=True)
    made = [folder / NAMES[form].format(step=step) for step in range(1, count + 1)]
    model = _model(0.01)
    for step, path in enumerate(made, start=1):
        if form == "changing_architecture":
            keras.backend.clear_session()
            model = _model(0.01, changed=step)
        model.set_weights([array * 0 + 0.01 * step for array in model.get_weights()])
        if form == "saved_model":
            model.export(str(path), verbose=False)
        elif form == "checkpoint":
            tf.train.Checkpoint(model).write(str(path))
        elif form == "weights":
            model.save_weights(path)
        else:
            model.save(path)
    del model
    keras.backend.clear_session()
    return made


def _publish(made: Path, path: Path) -> None:
    """Copy a checkpoint, which may be a folder or several files of one prefix, to its own path."""
    if made.is_dir():
        shutil.copytree(made, path.with_name(f".{path.name}"))
        path.with_name(f".{path.name}").rename(path)
        return
    for file in [made] if made.is_file() else sorted(made.parent.glob(f"{made.name}.*")):
        shutil.copy(file, path.parent / file.name)


def _wait_until_serving(evaluator: Evaluator, step: int) -> None:
    until = time.monotonic() + WAIT_SECONDS
    while evaluator.serving_step != step:
        if time.monotonic() > until:
            states = [f"{status.step} {status.state.name} {status.error}".strip() for status in evaluator.status()]
            raise TimeoutError(f"step {step} was not served within {WAIT_SECONDS:g} s; the versions are {states}")
        time.sleep(0.01)


def _freezing_at_once() -> ExitStack:
    """Freeze each version at once, whatever it gains."""
    from understudy.evaluator.assembly import serving_parts
    from understudy.evaluator.model import frozen

    stack = ExitStack()
    for owner, name in ((serving_parts, "SETTLING_SECONDS"), (frozen, "MIN_GAIN"), (frozen, "MIN_GAIN_OF_EACH")):
        stack.enter_context(mock.patch.object(owner, name, 0.0))
    return stack


def _wait_until_frozen(evaluator: Evaluator) -> None:
    until = time.monotonic() + WAIT_SECONDS
    while (note := evaluator.metadata().notes[-1]) != "Predict uses constants for the weights":
        if time.monotonic() > until:
            raise TimeoutError(f"not frozen within {WAIT_SECONDS:g} s: {note}")
        time.sleep(0.01)


def _resident_megabytes() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def _model(scale: float, changed: int = 0) -> Any:
    """Return a compiled model; each of `ARCHITECTURES` values of `changed` gives another architecture.

    The layers have few shapes between them, so that what TensorFlow caches for each shape is there once it has settled.
    """
    import keras

    order = changed * 37 % ARCHITECTURES
    widths = [WIDTHS[order // len(WIDTHS) ** layer % len(WIDTHS)] for layer in range(LAYERS)]
    x = hidden = keras.Input((FEATURES,), name="x")
    initializer = keras.initializers.Constant(scale)
    for width in widths:
        hidden = keras.layers.Dense(width, activation="relu", kernel_initializer=initializer)(hidden)
    model = keras.Model(x, keras.layers.Dense(4, name="y")(hidden))
    model.compile("sgd", "mse")
    return model


def _main() -> None:
    form, count = sys.argv[1], int(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(swap(form, count, Path(folder))))


if __name__ == "__main__":
    _main()
