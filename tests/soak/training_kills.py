"""SIGKILLs and SIGTERMs of training tasks at random moments: equal to an undisturbed training, and all of it scored.

Two workers and two mirrored replicas alternately train the bundled digits, with BatchNorm and Dropout. One task is
signalled, sometimes before the first step. All tasks must exit by themselves, with a status that asks for a restart,
and are restarted until the training is done. Then every array of the last step's state is compared with that of an
undisturbed training. One evaluator runs beside each disturbed training, from its first start to its end, and must
score every published checkpoint.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from soak.beside import EvaluatorBeside
from soak.trial import Trial
from testkit.ports import free_ports
from understudy.checkpoints import RunDir
from understudy.checkpoints.checkpoint_errors import LockHeldError
from understudy.checkpoints.layout import RESUME_DIR
from understudy.checkpoints.locks import DirectoryLock
from understudy.trainer import ClusterTimeoutError, PeerLostError, PreemptedError

SIGNALS = 70
_SHARES = 5 * [signal.SIGKILL] + 2 * [signal.SIGTERM]

STEPS = 600
SAMPLE = 10
"""Below this number of signals the trainings are shorter, and of one process each."""
SAMPLE_STEPS = 200
KINDS = ("multi_worker", "mirrored")
SAMPLE_KINDS = ("mirrored",)

_OPTIONS = (
    *("--checkpoint-every", "25", "--no-tensorboard", "--keep-checkpoints", "1000"),
    # As long as a task waits for one that was killed before it was seen; a task that does not join is awaited as long.
    *("--cluster-timeout-seconds", "30"),
)
_LONGEST_START_SECONDS = 15.0
_BUSY_SECONDS = 4.0
_EXIT_SECONDS = 120.0
_FINISH_SECONDS = 600.0
_VICTIMS_ENDS: dict[signal.Signals, tuple[int, ...]] = {
    signal.SIGKILL: (-signal.SIGKILL,),
    # The second is the status of a task that did not yet handle the signal.
    signal.SIGTERM: (PreemptedError.exit_code, -signal.SIGTERM),
}
_OTHERS_ENDS = (PeerLostError.exit_code, ClusterTimeoutError.exit_code, PreemptedError.exit_code)


def run(trial: Trial) -> None:
    """Send the requested number of signals, and compare each training that finished."""
    wanted = trial.count(SIGNALS)
    state: dict[str, Any] = {
        "SIGKILL": 0,
        "SIGTERM": 0,
        "before_the_first_step": 0,
        "trainings": 0,
        "equal": 0,
        "longest_exit_seconds": 0.0,
        "published": 0,
        "scored": 0,
        "without_a_score": [],
    }
    state |= trial.load_state()
    steps = STEPS if wanted >= SAMPLE else SAMPLE_STEPS
    while _disturbances(state) < wanted or _is_unfinished(trial.work):
        _train_to_the_end(trial, state, wanted=wanted, steps=steps)
    held = _held(state)
    trial.report(held=held, finished=True, wanted=wanted, steps=steps, **state)
    if held:
        trial.finish()


def _train_to_the_end(trial: Trial, state: dict[str, Any], *, wanted: int, steps: int) -> None:
    """Disturb one training until it is done, with an evaluator beside it, and check both."""
    kinds = KINDS if wanted >= SAMPLE else SAMPLE_KINDS
    kind = kinds[state["trainings"] % len(kinds)]
    run_dir, undisturbed = (trial.work / f"{name}-{kind}" for name in ("disturbed", "undisturbed"))
    with EvaluatorBeside(run_dir) as evaluator:
        while not _is_done(run_dir, steps):
            _await_lock(run_dir)
            tasks = _start(kind, run_dir, steps)
            done = _disturbances(state)
            if done < wanted:
                block, place = divmod(done, len(_SHARES))
                numbers = trial.chance(-1 - block).sample(_SHARES, len(_SHARES))
                _disturb(tasks, numbers[place], trial.chance(done), state)
            else:
                _finish(tasks)
            trial.save_state(state)
            trial.report(held=_held(state), finished=False, wanted=wanted, steps=steps, **state)
        unscored = evaluator.unscored()
    if not _is_done(undisturbed, steps):
        _finish(_start(kind, undisturbed, steps))
    state["trainings"] += 1
    state["equal"] += _is_equal(undisturbed, run_dir, steps)
    state["published"] += len(RunDir(run_dir).committed_steps())
    state["scored"] += unscored["scored"]
    state["without_a_score"] += [*unscored["missing"], *unscored["failed"]]
    shutil.rmtree(run_dir)
    trial.save_state(state)
    trial.report(held=_held(state), finished=False, wanted=wanted, steps=steps, **state)


def _disturbances(state: dict[str, Any]) -> int:
    return int(state["SIGKILL"] + state["SIGTERM"])


def _held(state: dict[str, Any]) -> bool:
    all_equal = 0 < state["trainings"] == state["equal"]
    return bool(all_equal and state["published"] == state["scored"] and not state["without_a_score"])


def _is_done(run_dir: Path, steps: int) -> bool:
    return RunDir(run_dir).committed_steps()[-1:] == [steps]


def _is_unfinished(work: Path) -> bool:
    """Whether a disturbed training is unfinished."""
    return any((work / f"disturbed-{kind}").exists() for kind in KINDS)


Tasks = list[tuple[subprocess.Popen[bytes], Path]]


def _start(kind: str, run_dir: Path, steps: int) -> Tasks:
    run_dir.mkdir(parents=True, exist_ok=True)
    training = (*_OPTIONS, "--steps", str(steps), "--strategy", kind)
    if kind == "mirrored":
        return [_start_task(run_dir, 0, (*training, "--logical-cpus", "2"), {})]
    workers = [f"127.0.0.1:{port}" for port in free_ports(2)]
    return [
        _start_task(
            run_dir,
            index,
            training,
            {"TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})},
        )
        for index in range(len(workers))
    ]


def _start_task(run_dir: Path, index: int, options: tuple[str, ...], environ: dict[str, str]) -> Any:
    command = [sys.executable, "-m", "understudy.cli", "train", "digits", "--run-dir", str(run_dir)]
    log = run_dir / f"task-{index}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *options],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", **environ},
        )
    return process, log


def _disturb(tasks: Tasks, number: signal.Signals, chance: random.Random, state: dict[str, Any]) -> None:
    """Signal one of the tasks at some moment, and wait until all have exited, as they must by themselves."""
    victim, log = chance.choice(tasks)
    if chance.random() < 0.25:
        time.sleep(chance.uniform(0, _LONGEST_START_SECONDS))
    else:
        _wait_until_training(victim, log)
        time.sleep(chance.uniform(0, _BUSY_SECONDS))
    if victim.poll() is not None:
        # It was done before; that is no disturbance.
        _finish(tasks)
        return
    victim.send_signal(number)
    signalled_at = time.monotonic()
    had_trained = _has_trained(log)
    _end(tasks, _EXIT_SECONDS)
    state["longest_exit_seconds"] = max(state["longest_exit_seconds"], round(time.monotonic() - signalled_at, 1))
    state["before_the_first_step"] += not had_trained
    state[number.name] += 1
    _check_ends(tasks, victim, number, had_trained=had_trained)


def _check_ends(tasks: Tasks, victim: subprocess.Popen[bytes], number: signal.Signals, *, had_trained: bool) -> None:
    """Raise RuntimeError unless each task exited as a supervisor needs it to."""
    for process, log in tasks:
        expected = _VICTIMS_ENDS[number] if process is victim else _OTHERS_ENDS
        done = process.returncode == 0 and had_trained
        if process.returncode not in expected and not done:
            whom = "it" if process is victim else "the other"
            raise RuntimeError(f"after {number.name} to {whom}, a task ended with {process.returncode}; see {log}")


def _wait_until_training(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _FINISH_SECONDS
    while not _has_trained(log) and process.poll() is None:
        if time.monotonic() > deadline:
            raise RuntimeError(f"no step was done in {_FINISH_SECONDS:g} s; see {log}")
        time.sleep(0.05)


def _has_trained(log: Path) -> bool:
    return b"\nstep " in log.read_bytes()


def _finish(tasks: Tasks) -> None:
    _end(tasks, _FINISH_SECONDS)
    for process, log in tasks:
        if process.returncode != 0:
            raise RuntimeError(f"an undisturbed task ended with {process.returncode}; see {log}")


def _end(tasks: Tasks, seconds: float) -> None:
    """Wait for all tasks to end; leave none behind."""
    deadline = time.monotonic() + seconds
    try:
        for process, _ in tasks:
            process.wait(max(0.0, deadline - time.monotonic()))
    finally:
        for process, _ in tasks:
            process.kill()
            process.wait()


def _await_lock(run_dir: Path) -> None:
    """Wait until no task has the run folder: one that was killed may be a fork, which ends a moment later."""
    deadline = time.monotonic() + _FINISH_SECONDS
    while run_dir.exists():
        try:
            with DirectoryLock(run_dir):
                return
        except LockHeldError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _is_equal(one: Path, other: Path, step: int) -> bool:
    states = [np.load(RunDir(path).checkpoint(step) / RESUME_DIR / "state.npz") for path in (one, other)]
    with states[0], states[1]:
        first, second = ({name: arrays[name].tobytes() for name in arrays.files} for arrays in states)
        return first == second
