"""Measures what calls of a model cost with some of TensorFlow's threads, in a process of its own.

TensorFlow cannot change its threads once it runs. The process has the lowest priority, is the first that the kernel
ends when memory runs out, and ends when the process that started it does.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, cast

from understudy.checkpoints.kinds import ModelKind
from understudy.evaluator.evaluator_errors import NotFrozenError, TrialError
from understudy.evaluator.tuning.choice import (
    BRIEF_SECONDS,
    LONGEST_CALL_SECONDS,
    SIZES,
    CallCost,
    Measurement,
    Threads,
    gathering_seconds,
    largest_batch,
)

TRIAL_SECONDS = 120.0
"""How long a trial may take."""

_MODULE = "understudy.evaluator.tuning.trial"
_LEAST_CALLS = 5
_TIMED_SECONDS = 0.2
_MEMORY_SHARE = 4
"""A batch may take this part of the memory that is available."""
_LARGEST_STEP = 4
"""The next size of `SIZES` is at most this many times as large, and so is the memory that it takes."""
_POLL_SECONDS = 0.1
_LOWEST_PRIORITY = 19
_FIRST_TO_END = "1000"


@dataclass(frozen=True, kw_only=True)
class TrialRequest:
    """A model, and the threads to measure it with.

    Attributes:
        model_file: Its file, see `understudy.checkpoints.local_checkpoint.LocalCheckpoint.model_file`.
        kind: How it is stored, a value of `ModelKind`.
        experiment: What `understudy.experiments.load_experiment` loads the experiment by; None if there is none.
        allow_unsafe_models: Whether a stored model may name any class, function and operation.
        devices: See `understudy.evaluator.model.devices.DeviceSettings`, and so ``logical_cpus``.
        frozen_memory_mib: The memory that constants for the weights may take.
        threads: The threads.
        pairs: Whether to measure two batches at the same time.
    """

    model_file: str
    kind: str
    experiment: str | None
    allow_unsafe_models: bool
    devices: tuple[str, ...]
    logical_cpus: int | None
    frozen_memory_mib: int
    threads: Threads
    pairs: bool = True


def run_trial(
    request: TrialRequest, is_wanted: Callable[[], bool], *, timeout_seconds: float = TRIAL_SECONDS
) -> Measurement | None:
    """Measure in a new process; return None once it is not wanted any more. The process has ended afterwards.

    Raises:
        TrialError: The process failed, or took too long.
    """
    environ = {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ}
    answer: list[bytes] = []
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environ,
            start_new_session=True,
        )
        reader = threading.Thread(target=lambda: answer.append(_ask(process, request)), name="understudy-trial")
        reader.start()
        gives_up_at = time.monotonic() + timeout_seconds
        try:
            while reader.is_alive() and is_wanted() and time.monotonic() < gives_up_at:
                reader.join(_POLL_SECONDS)
            is_late = reader.is_alive()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a process that a user's code started would hold the pipes
            reader.join()
            process.communicate()  # closes the pipes, and waits for the end
        errors.seek(0)
        text = errors.read().decode(errors="replace").strip()
    if not is_wanted():
        return None
    if is_late:
        raise TrialError(f"the trial took more than {timeout_seconds:.0f} s")
    if not answer[0]:
        raise TrialError(f"the trial failed: {text.splitlines()[-1] if text else 'its process was killed'}")
    costs, gains_of_two = json.loads(answer[0])
    calls = {int(size): CallCost(**cost) for size, cost in costs.items()}
    return Measurement(threads=request.threads, calls=calls, gains_of_two=gains_of_two)


def _ask(process: subprocess.Popen[bytes], request: TrialRequest) -> bytes:
    """Send the request, leave standard input open, and return the line of the answer; empty if the process ended."""
    requests, answers = cast("IO[bytes]", process.stdin), cast("IO[bytes]", process.stdout)
    with suppress(BrokenPipeError):
        requests.write(json.dumps(asdict(request)).encode() + b"\n")
        requests.flush()
    return answers.readline()


def main() -> None:
    """Answer the request on standard input, and end when that ends."""
    os.nice(_LOWEST_PRIORITY)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_END, encoding="ascii")
    request = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    answer_to = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # a user's code may print
    threads = Threads(**request.pop("threads"))
    measured = measure(TrialRequest(**{**request, "devices": tuple(request["devices"]), "threads": threads}))
    calls = {size: asdict(cost) for size, cost in measured.calls.items()}
    print(json.dumps([calls, measured.gains_of_two]), file=answer_to, flush=True)


def _end_with_input() -> None:
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGKILL)


def measure(request: TrialRequest) -> Measurement:
    """Load the model and measure its calls.

    Sizes that take too long, or too much memory, are left out, and so are all larger ones.
    """
    from understudy.devices.host import available_memory_bytes, usable_cores
    from understudy.evaluator.model.devices import DeviceSettings, build_strategy
    from understudy.evaluator.model.loaders import loader_for
    from understudy.evaluator.model.slot import Slot
    from understudy.experiments import load_experiment

    strategy = build_strategy(
        DeviceSettings(
            devices=request.devices,
            logical_cpus=request.logical_cpus,
            intra_op_threads=request.threads.intra_op,
            inter_op_threads=request.threads.inter_op,
        )
    )
    build_model = None if request.experiment is None else load_experiment(request.experiment).build_model
    loader = loader_for(ModelKind(request.kind), build_model, allow_unsafe_models=request.allow_unsafe_models)
    slot = Slot(strategy, Path(request.model_file), max_batch_size=max(SIZES), loader=loader)
    with suppress(NotFrozenError):
        slot.freeze(limit_mib=request.frozen_memory_mib, check_wanted=lambda: None, largest=slot.replicas)
    calls: dict[int, CallCost] = {}
    grown, used = 0, _peak_bytes()
    for size in SIZES:
        if _LARGEST_STEP * grown > available_memory_bytes() // _MEMORY_SHARE:
            break
        calls[size] = _cost(slot, size * slot.replicas)
        grown = max(0, _peak_bytes() - used)
        if calls[size].wall_seconds > LONGEST_CALL_SECONDS:
            break
    wants_pairs = request.pairs and slot.may_overlap and usable_cores() > 1
    gains = gains_of_two(slot, calls) if wants_pairs else []
    return Measurement(threads=request.threads, calls=calls, gains_of_two=gains)


def gains_of_two(slot: Any, calls: Mapping[int, CallCost]) -> list[list[float]]:
    """Return the gain of two batches at the same time in each turn with each load; see `Measurement`."""
    from understudy.evaluator.batching.engine import EngineSettings
    from understudy.evaluator.tuning.closed_loop import LOADS, measure_loads

    largest = largest_batch(calls)
    batch = calls.get(min(largest, max(load.callers * load.examples for load in LOADS)))
    if batch is None or not BRIEF_SECONDS <= batch.wall_seconds <= LONGEST_CALL_SECONDS:
        return []  # it is too brief to be shared out, or the turns would take too long
    settings = EngineSettings(max_batch_size=largest * slot.replicas, gathering_seconds=gathering_seconds(calls))
    inputs = {load.examples: slot.generated_inputs(load.examples) for load in LOADS}
    answers = measure_loads(slot, inputs, settings, batch_seconds=batch.wall_seconds)
    return [[turn.two_batches / turn.one_batch for turn in turns] for turns in answers]


def _cost(slot: Any, examples: int) -> CallCost:
    """Return the least time of a call, and the mean CPU time."""
    inputs = slot.generated_inputs(examples)
    slot.forward(inputs)
    cpu = time.process_time()
    walls = _walls(lambda: slot.forward(inputs), time.monotonic() + _TIMED_SECONDS)
    return CallCost(wall_seconds=min(walls), cpu_seconds=(time.process_time() - cpu) / len(walls))


def _walls(call: Callable[[], object], ends: float) -> list[float]:
    """Return how long each call took, until a moment on the clock of `time.monotonic`."""
    walls: list[float] = []
    while len(walls) < _LEAST_CALLS or time.monotonic() < ends:
        began = time.monotonic()
        call()
        walls.append(time.monotonic() - began)
        if sum(walls) > _LEAST_CALLS * LONGEST_CALL_SECONDS:
            break
    return walls


def _peak_bytes() -> int:
    """Return the most memory that this process has had so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
