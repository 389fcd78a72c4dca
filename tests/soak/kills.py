"""SIGKILLs of the evaluator, at random moments of a run: every checkpoint is exactly once per dataset in the ledger.

``understudy serve`` restarts after each kill, while checkpoints are published. Half of the kills come
at any time from the start of the process on, half within half a second after it is ready, when it loads and scores. A
last evaluator then finishes, and the ledger and the results are compared with the published checkpoints.
"""

from __future__ import annotations

import json
import random
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from soak.numbered import NumberedCheckpoints, save_dataset
from soak.programs import START_SECONDS, start
from soak.trial import Trial
from understudy.checkpoints import RunDir, TrainingJournal
from understudy.evaluator.records.ledger import Ledger

KILLS = 200
CHECKPOINTS = 50
DATASETS = {"validation": 3000, "test": 1000}

_BUSY_SECONDS = 0.5
_FINISH_SECONDS = 600.0


def run(trial: Trial) -> None:
    """Kill as often as requested, then check the ledger."""
    kills = trial.count(KILLS)
    checkpoints = min(CHECKPOINTS, max(2, kills // 4))
    run_dir = RunDir(trial.work / "run")
    state = {"kills": 0, "published": 0, "seconds_to_ready": 10.0} | trial.load_state()
    data = save_datasets(trial.work)
    publisher = NumberedCheckpoints(run_dir)
    state["published"] = len(run_dir.committed_steps())
    while state["kills"] < kills:
        due = 1 + (checkpoints - 1) * (state["kills"] + 1) // kills
        while state["published"] < due:
            state["published"] += 1
            publisher.publish(state["published"], final=state["published"] == checkpoints)
        ready = _kill_once(run_dir, data, trial.chance(state["kills"]), state["seconds_to_ready"])
        state["seconds_to_ready"] = ready or state["seconds_to_ready"]
        state["kills"] += 1
        trial.save_state(state)
        found = compare(run_dir, range(1, checkpoints + 1))
        trial.report(held=not found["duplicates"], kills=state["kills"], checkpoints=checkpoints, finished=False)
    finish(run_dir, data, step=checkpoints)
    found = compare(run_dir, range(1, checkpoints + 1))
    held = not any(found.values())
    trial.report(held=held, kills=kills, checkpoints=checkpoints, datasets=len(DATASETS), finished=True, **found)
    if held:
        trial.finish()


def save_datasets(folder: Path) -> list[str]:
    """Write the datasets; return their options."""
    options = []
    for name, rows in DATASETS.items():
        file = folder / f"{name}.npz"
        save_dataset(file, rows=rows)
        options += ["--eval-data", f"{name}={file}"]
    return options


def _kill_once(run_dir: RunDir, data: list[str], chance: random.Random, seconds_to_ready: float) -> float | None:
    """Start an evaluator and kill it; return the time until it was ready, if that was awaited."""
    began = time.monotonic()
    process = start(run_dir.root, "--run-dir", str(run_dir.root), *data)
    ready = None
    try:
        if chance.random() < 0.5:
            _wait_until_ready(process)
            ready = time.monotonic() - began
            time.sleep(chance.uniform(0, _BUSY_SECONDS))
        else:
            time.sleep(chance.uniform(0, seconds_to_ready + _BUSY_SECONDS))
        if process.poll() is not None:
            raise RuntimeError(f"the evaluator ended by itself with {process.returncode}; see {run_dir.root}/serve.log")
    finally:
        process.kill()
        process.communicate()
    return ready


def _wait_until_ready(process: subprocess.Popen[str]) -> None:
    watchdog = threading.Timer(START_SECONDS, process.kill)
    watchdog.start()
    try:
        assert process.stdout is not None
        if not any(line.startswith("READY") for line in process.stdout):
            raise RuntimeError("the evaluator was not ready in time, or ended")
    finally:
        watchdog.cancel()
        watchdog.join()


def finish(run_dir: RunDir, data: list[str], *, step: int) -> None:
    """Record that training is over, and let an evaluator finish."""
    with TrainingJournal(run_dir) as journal:
        journal.record_step(step)
    process = start(run_dir.root, "--run-dir", str(run_dir.root), *data, "--exit-when-finished")
    try:
        process.communicate(timeout=_FINISH_SECONDS)
    finally:
        process.kill()
        process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"the last evaluator ended with {process.returncode}; see {run_dir.root}/serve.log")


def compare(run_dir: RunDir, steps: range) -> dict[str, Any]:
    """Return the missing and the duplicate entries of the ledger and the results."""
    file = run_dir.evaluator / "ledger.sqlite"
    if not file.exists():
        return {"duplicates": []}
    ledger = Ledger(file)
    try:
        records = ledger.page(limit=1_000_000)
    finally:
        ledger.close()
    entries = Counter((record.step, record.dataset) for record in records)
    expected = {(step, name) for step in steps for name in DATASETS}
    return {
        "duplicates": sorted(entry for entry, times in entries.items() if times > 1),
        "missing": sorted(expected - entries.keys()),
        "unexpected": sorted(entries.keys() - expected),
        "wrong_scores": [r.step for r in records if abs(r.metrics["loss"] - r.step**2) > 1e-4 * r.step**2],
        "results_not_settled": [step for step in steps if not _is_settled(run_dir, step)],
    }


def _is_settled(run_dir: RunDir, step: int) -> bool:
    file = run_dir.evaluator / "results" / f"{run_dir.checkpoint(step).name}.json"
    return file.exists() and bool(json.loads(file.read_bytes())["settled"])
