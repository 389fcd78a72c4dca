"""Promotions and rollbacks under load: every server of a fleet carries out each, and no answer fails or is torn.

Processes ``understudy serve --follow HOST:PORT`` follow an evaluator, without a folder that they share with it. A
thread for each of them, and one through a stock Envoy before them all, predict all the time, and check that every
answer is the one of the version that it names. After each promotion the time is taken until each server has answered
with the new version.

Before that, the memory of the servers is compared with that of one that does not follow, and the evaluator's processor
time is taken while it has nothing to do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import psutil

from soak.programs import START_SECONDS, Program
from soak.trial import Trial
from testkit.checkpoints import Chief, ones
from testkit.envoy import proxied
from understudy.checkpoints import RunDir
from understudy.clients import Client

PROMOTIONS = 200
SERVERS = 8
SAMPLE_SERVERS = 2
STEPS = (10, 20, 30)
GOAL_SECONDS = 1.0
MOST_FAILURES = 20

GOAL_MEMORY = 1.05
"""The most memory of a server that follows, as a share of one that does not."""

_IDLE_SECONDS = 20.0
_SAMPLE_IDLE_SECONDS = 1.0
_WARMING_CALLS = 100
_PAUSE_SECONDS = 0.002
_BEHIND_SECONDS = 60.0
_LOOK_SECONDS = 0.1


class _Caller:
    """Calls through one client all the time.

    Attributes:
        answers: How many calls have been answered.
        failures: The calls that failed, or had a wrong answer.
    """

    def __init__(self, client: Client) -> None:
        self.answers = 0
        self.failures: list[str] = []
        self._client = client
        self._changed = threading.Condition()
        self._step: int | None = None
        self._step_since = 0.0
        self._over = False
        self._thread = threading.Thread(target=self._call, name="caller")
        self._thread.start()

    def wait_for(self, step: int, since: float) -> float:
        """Return the seconds from a time until an answer of this step."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._step == step, _BEHIND_SECONDS):
                self.failures.append(f"no answer of step {step} within {_BEHIND_SECONDS} s")
        return max(0.0, self._step_since - since)

    def close(self) -> None:
        """Stop calling."""
        self._over = True
        self._thread.join()

    def _call(self) -> None:
        batch = ones(3)
        while not self._over:
            try:
                result = self._client.predict({"x": batch})
                if not np.allclose(result.output, result.step):
                    self.failures.append(f"step {result.step} answered {result.output.tolist()}")
                self.answers += 1
                with self._changed:
                    if result.step != self._step:
                        self._step, self._step_since = result.step, time.monotonic()
                        self._changed.notify_all()
            except Exception as error:  # noqa: BLE001 - reported
                self.failures.append(repr(error))
            time.sleep(_PAUSE_SECONDS)


def run(trial: Trial) -> None:
    """Promote as often as requested."""
    promotions = trial.count(PROMOTIONS)
    is_sample = promotions < PROMOTIONS
    servers = SAMPLE_SERVERS if is_sample else SERVERS
    chief = Chief(trial.work / "run")
    for step in sorted({*STEPS} - {*RunDir(trial.work / "run").committed_steps()}):
        chief.publish(step)
    earlier = trial.load_state() or {"answers": 0, "answers_through_envoy": 0, "failures": [], "seconds": []}
    with ExitStack() as stack:
        deciding = ("--run-dir", str(trial.work / "run"), f"--version-policy={STEPS[0]}")
        evaluator = Program(trial.work, *deciding, is_fork=is_sample)
        stack.callback(evaluator.kill)
        evaluator.wait_for("READY")
        programs = []
        for number in range(servers):
            named = ("--follow", evaluator.grpc, "--follow-name", f"server-{number}")
            state = f"--state-dir={trial.work / f'state-{number}'}"
            programs.append(Program(trial.work, *named, state, is_fork=is_sample))
            stack.callback(programs[-1].kill)
        for program in programs:
            program.wait_for("READY")
        alone = Program(trial.work, *deciding, f"--state-dir={trial.work / 'alone'}", is_fork=is_sample)
        try:
            alone.wait_for("READY")
            costs = _costs(evaluator, programs, alone, _SAMPLE_IDLE_SECONDS if is_sample else _IDLE_SECONDS)
        finally:
            alone.kill()
        client = stack.enter_context(Client(evaluator.grpc, timeout_seconds=START_SECONDS))
        callers = [_Caller(stack.enter_context(Client(program.grpc))) for program in programs]
        behind_envoy = _Caller(stack.enter_context(proxied([program.grpc for program in programs])))
        for caller in (*callers, behind_envoy):
            stack.callback(caller.close)
        seconds: list[float] = list(earlier["seconds"])
        for number in range(len(seconds) // servers, promotions):
            step = STEPS[(number + 1) % len(STEPS)]
            seconds += _promote(client, callers, step, rolls_back=number % 5 == 4)
            counts = _counts(earlier, callers, behind_envoy)
            trial.save_state({**counts, "seconds": seconds})
            held = not counts["failures"]
            done = {"promotions": number + 1, "servers": servers, "finished": False, **costs}
            trial.report(held=held, **done, **counts, **_times(seconds))
        is_carried_out = _is_reported(client, servers)
    counts = _counts(earlier, callers, behind_envoy)
    is_small = is_sample or costs["follower_memory"] <= GOAL_MEMORY
    held = is_carried_out and not counts["failures"] and is_small
    done = {"promotions": promotions, "servers": servers, "finished": True, **costs}
    trial.report(held=held, **done, **counts, **_times(seconds))
    if held:
        trial.finish()


def _costs(evaluator: Program, followers: Sequence[Program], alone: Program, seconds: float) -> dict[str, float]:
    """Return what servers that follow cost while no version changes.

    Memory is that of a process alone (USS), after some calls; processor time is a share of one core.
    """
    for program in (*followers, alone):
        with Client(program.grpc, timeout_seconds=START_SECONDS) as client:
            for _ in range(_WARMING_CALLS):
                client.predict({"x": ones(3)})
    idle = {"evaluator_idle_cpu": evaluator, "alone_idle_cpu": alone}
    before = {name: _cpu_seconds(program) for name, program in idle.items()}
    time.sleep(seconds)
    shares = {name: (_cpu_seconds(program) - before[name]) / seconds for name, program in idle.items()}
    largest, own = max(map(_memory_mib, followers)), _memory_mib(alone)
    return {"follower_mib": largest, "alone_mib": own, "follower_memory": largest / own, **shares}


def _memory_mib(program: Program) -> float:
    return float(psutil.Process(program.process_id).memory_full_info().uss) / 2**20


def _cpu_seconds(program: Program) -> float:
    times = psutil.Process(program.process_id).cpu_times()
    return float(times.user + times.system)


def _promote(client: Client, callers: list[_Caller], step: int, *, rolls_back: bool) -> list[float]:
    """Promote a step, or roll back; return how long each server took from the evaluator's answer on."""
    promoted = client.roll_back() if rolls_back else client.promote(step)
    since = time.monotonic()
    return [caller.wait_for(promoted.serving_step, since) for caller in callers]


def _is_reported(client: Client, servers: int) -> bool:
    """Return whether all servers report the last decision as carried out, which they may do after they answer by it."""
    ends = time.monotonic() + _BEHIND_SECONDS
    while time.monotonic() < ends:
        if [each.current for each in client.fleet().servers] == [True] * servers:
            return True
        time.sleep(_LOOK_SECONDS)
    return False


def _counts(earlier: Mapping[str, Any], callers: list[_Caller], behind_envoy: _Caller) -> dict[str, Any]:
    """Return what all callers counted, also before the trial was resumed."""
    everyone = [*callers, behind_envoy]
    failures = [*earlier["failures"], *(failure for caller in everyone for failure in caller.failures)]
    return {
        "answers": earlier["answers"] + sum(caller.answers for caller in everyone),
        "answers_through_envoy": earlier["answers_through_envoy"] + behind_envoy.answers,
        "failures": failures[:MOST_FAILURES],
    }


def _times(seconds: list[float]) -> dict[str, float]:
    return {
        "median_seconds": float(np.median(seconds)),
        "p99_seconds": float(np.quantile(seconds, 0.99)),
        "longest_seconds": max(seconds),
        "within_goal": sum(each <= GOAL_SECONDS for each in seconds) / len(seconds),
    }
