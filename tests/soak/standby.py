"""SIGKILLs of one of two evaluators of a run: the other takes over, and the ledger has every checkpoint once.

Two processes ``understudy serve --standby`` share a state folder. The one that serves is killed at a random moment,
while checkpoints are published. The other one takes over, and a new one stands by. A last evaluator then finishes, and
the ledger and the results are compared with the published checkpoints.
"""

from __future__ import annotations

import time
from statistics import median

from soak.kills import compare, finish, save_datasets
from soak.numbered import NumberedCheckpoints
from soak.programs import Program
from soak.trial import Trial
from understudy.checkpoints import RunDir

KILLS = 100
CHECKPOINTS = 50

_BUSY_SECONDS = 1.0
_TAKEOVER_SECONDS = 30.0
"""The longest time from a death until the other one serves."""


def _stand_by(run_dir: RunDir, data: list[str]) -> Program:
    """Start an evaluator that takes over, now or later."""
    return Program(run_dir.root, "--run-dir", str(run_dir.root), *data, "--standby")


def run(trial: Trial) -> None:
    """Kill as often as requested, then check the ledger."""
    kills = trial.count(KILLS)
    checkpoints = min(CHECKPOINTS, max(2, kills // 2))
    run_dir = RunDir(trial.work / "run")
    data = save_datasets(trial.work)
    publisher = NumberedCheckpoints(run_dir)
    if not run_dir.committed_steps():
        publisher.publish(1, final=False)
    seconds: list[float] = trial.load_state().get("seconds", [])
    serving, waiting = _stand_by(run_dir, data), None
    try:
        serving.wait_for("READY")
        for number in range(len(seconds), kills):
            waiting = _stand_by(run_dir, data)
            due = 1 + (checkpoints - 1) * (number + 1) // kills
            for step in range(len(run_dir.committed_steps()) + 1, due + 1):
                publisher.publish(step, final=step == checkpoints)
            time.sleep(trial.chance(number).uniform(0, _BUSY_SECONDS))
            serving.kill()
            died = time.monotonic()
            waiting.wait_for("READY")
            seconds.append(time.monotonic() - died)
            serving, waiting = waiting, None
            trial.save_state({"seconds": seconds})
            trial.report(
                held=max(seconds) < _TAKEOVER_SECONDS, kills=number + 1, longest_seconds=max(seconds), finished=False
            )
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
