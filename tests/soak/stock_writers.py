"""Stock writers at full speed with a concurrent evaluator: no failed save, no torn read.

A subprocess (`soak.stock_script`) saves after every training step, in one format after another, overwriting
or deleting earlier saves. The evaluator follows its folder. Meanwhile a thread sends predictions: each answer must be
exactly what the weights of its step give. ``--count`` is the seconds that each format is written.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from soak import stock_script
from soak.trial import Trial
from understudy.checkpoints import FolderSource
from understudy.evaluator.evaluator import Evaluator
from understudy.evaluator.evaluator_errors import NotReadyError
from understudy.evaluator.observer import SilentObserver
from understudy.evaluator.serving import version_monitor
from understudy.evaluator.settings import EvaluatorSettings

SECONDS = 60

_WAIT_SECONDS = 60.0
_ASK_SECONDS = 0.002
_GONE = ("overwritten or deleted before", "was deleted before", "there is no checkpoint of step")
"""The evaluator's messages for a writer that was faster."""


@dataclass
class Tally:
    """The results of one format.

    Attributes:
        saves: Number of saves.
        failed_saves: Errors of the writer.
        loaded: Number of different steps that answered predictions.
        predictions: Number of checked predictions.
        wrong: Answers that differ from what their step's weights give.
        gone: Number of checkpoints that were overwritten or deleted before they could be fetched.
        torn: Reasons why others could not be fetched or loaded.
        last_served: Whether the last save started serving in the end.
    """

    saves: int = 0
    failed_saves: list[str] = field(default_factory=list)
    loaded: int = 0
    predictions: int = 0
    wrong: list[str] = field(default_factory=list)
    gone: int = 0
    torn: list[str] = field(default_factory=list)
    last_served: bool = False

    @property
    def held(self) -> bool:
        """Whether no save failed, no read was torn, and something was read."""
        return self.last_served and self.loaded > 0 and not (self.failed_saves or self.wrong or self.torn)


def run(trial: Trial) -> None:
    """Try every format that is not done yet."""
    seconds = trial.count(SECONDS)
    done: dict[str, Any] = trial.load_state()
    with _writer() as writer:
        for name in stock_script.WRITERS:
            if name in done:
                continue
            tally = _try(name, writer, seconds, trial.work / name)
            done[name] = {"held": tally.held, "seconds": seconds, **asdict(tally)}
            trial.save_state(done)
            trial.report(held=all(result["held"] for result in done.values()), formats=done)
    trial.finish()


@contextmanager
def _writer() -> Iterator[subprocess.Popen[str]]:
    script = subprocess.Popen(
        [sys.executable, stock_script.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"},
    )
    with script:
        try:
            yield script
        finally:
            script.kill()


def _try(name: str, writer: subprocess.Popen[str], seconds: float, work: Path) -> Tally:
    """Write and read one format at the same time."""
    folder = work / "theirs"
    folder.mkdir(parents=True, exist_ok=True)
    tally, steps = Tally(), set[int]()
    with _Failures() as failures, _evaluator(folder, work / "state") as evaluator:
        assert writer.stdin is not None
        assert writer.stdout is not None
        writer.stdin.write(f"{name} {folder} {seconds}\n")
        writer.stdin.flush()
        os.set_blocking(writer.stdout.fileno(), False)
        line = ""
        while not line.endswith("\n"):  # one read may return less than a line, or the rest of the last one
            assert writer.poll() is None, "the writer ended"
            _ask(evaluator, tally, steps)
            line = (line + writer.stdout.readline()).lstrip()
        report = json.loads(line)
        tally.saves, tally.failed_saves = report["saves"], report["failures"]
        ends = time.monotonic() + _WAIT_SECONDS
        while report["last_step"] not in steps and time.monotonic() < ends:
            _ask(evaluator, tally, steps)
        tally.last_served = report["last_step"] in steps
    tally.loaded = len(steps)
    tally.torn = sorted(reason for reason in failures.reasons if not any(words in reason for words in _GONE))
    tally.gone = len(failures.reasons) - len(tally.torn)
    return tally


class _Failures(logging.Handler):
    """Collects from the log why checkpoints could not be fetched or loaded. A context manager."""

    def __init__(self) -> None:
        super().__init__()
        self.reasons: list[str] = []
        self._log = logging.getLogger(version_monitor.__name__)

    def emit(self, record: logging.LogRecord) -> None:
        if hasattr(record, "reason"):
            self.reasons.append(str(record.reason))

    def __enter__(self) -> Self:
        self._log.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._log.removeHandler(self)


def _evaluator(folder: Path, state: Path) -> Evaluator:
    return Evaluator(
        EvaluatorSettings(state_dir=state, logical_cpus=2, poll_interval_seconds=0.01, max_batch_size=4, slots=2),
        source=FolderSource(folder, state / "staging", takes_variables=True),
        build_model=stock_script.build_model,
        observer=SilentObserver(),
    )


def _ask(evaluator: Evaluator, tally: Tally, steps: set[int]) -> None:
    """Send a prediction and compare the answer with the weights of its step."""
    time.sleep(_ASK_SECONDS)
    try:
        names = [spec.name for spec in evaluator.metadata().signature.inputs]
    except NotReadyError:
        return
    rows = np.ones((2, stock_script.WIDTH), np.float32)
    prediction = evaluator.predict({names[0]: rows}).result(_WAIT_SECONDS)
    (output,) = prediction.outputs.values()
    expected = (stock_script.weight_of(prediction.step) * stock_script.WIDTH) ** 2
    tally.predictions += 1
    steps.add(prediction.step)
    if not np.allclose(output, expected, rtol=1e-4, atol=0):
        tally.wrong.append(f"step {prediction.step}: {output.min()} to {output.max()} instead of {expected}")
