"""SIGKILLs of one of two evaluators of a run: the other takes over, and the ledger has every checkpoint once.

Two processes ``understudy serve --standby`` share a state folder. The one that serves is killed at a random moment,
while checkpoints are published. The other one takes over, and a new one stands by. A last evaluator then finishes, and
the ledger and the results are compared with the published checkpoints.
"""

from __future__ import annotations

import queue
import threading
import time
from statistics import median

from soak.kills import compare, finish, save_datasets, start
from soak.numbered import NumberedCheckpoints
from soak.trial import Trial
from understudy.checkpoints import RunDir

KILLS = 100
CHECKPOINTS = 50

_BUSY_SECONDS = 1.0
_START_SECONDS = 120.0
_TAKEOVER_SECONDS = 30.0
"""The longest time from a death until the other one serves."""


class _Evaluator:
    """A process, and the lines that it prints."""

    def __init__(self, run_dir: RunDir, data: list[str]) -> None:
        self.process = start(run_dir, *data, "--standby")
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, name="lines-of-evaluator")
        self._reader.start()
        self.wait_for("LISTENING")

    def wait_for(self, word: str) -> None:
        """Wait until it prints a line that begins with a word."""
        until = time.monotonic() + _START_SECONDS
        while not self._lines.get(timeout=max(0.0, until - time.monotonic())).startswith(word):
            pass

    def kill(self) -> None:
        """End it by SIGKILL."""
        self.process.kill()
        self.process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._lines.put(line)


def run(trial: Trial) -> None:
    """Kill as often as requested, then check the ledger."""
    kills = trial.count(KILLS)
    checkpoints = min(CHECKPOINTS, max(2, kills // 2))
    run_dir = RunDir(trial.work / "run")
    data = save_datasets(trial.work)
    publisher = NumberedCheckpoints(run_dir)
    publisher.publish(1, final=False)
    seconds: list[float] = []
    serving, waiting = _Evaluator(run_dir, data), None
    try:
        serving.wait_for("READY")
        for number in range(kills):
            waiting = _Evaluator(run_dir, data)
            due = 1 + (checkpoints - 1) * (number + 1) // kills
            for step in range(len(run_dir.committed_steps()) + 1, due + 1):
                publisher.publish(step, final=step == checkpoints)
            time.sleep(trial.chance(number).uniform(0, _BUSY_SECONDS))
            serving.kill()
            died = time.monotonic()
            waiting.wait_for("READY")
            seconds.append(time.monotonic() - died)
            serving, waiting = waiting, None
            trial.report(held=max(seconds) < _TAKEOVER_SECONDS, kills=number + 1, finished=False)
    finally:
        for each in filter(None, (serving, waiting)):
            each.kill()
    finish(run_dir, data, step=checkpoints)
    found = compare(run_dir, range(1, checkpoints + 1))
    held = not any(found.values()) and max(seconds) < _TAKEOVER_SECONDS
    trial.report(
        held=held,
        kills=kills,
        checkpoints=checkpoints,
        median_seconds=median(seconds),
        longest_seconds=max(seconds),
        finished=True,
        **found,
    )
    if held:
        trial.finish()
