"""The model in this process, without a wire: its concrete function called directly, or the evaluator.

    python -m benchmarks.speed.programs.in_process function|evaluator MODEL MODEL_FILE FOLDER [SETTING=VALUE...]

A worker: given ``rows``, ``callers`` and ``seconds``, it keeps this many requests in flight for this long.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.speed.h2load import WARM_UP_SECONDS
from benchmarks.speed.models import INPUT, Floats, model_named
from benchmarks.speed.peers.forward import Forward
from benchmarks.speed.processes import BenchmarkError
from benchmarks.speed.workers import answer_questions
from understudy.checkpoints.folder_source import FolderSource
from understudy.evaluator import Evaluator, EvaluatorSettings, SilentObserver

READY_SECONDS = 60.0
ANSWER_SECONDS = 60.0

Submit = Callable[[Floats], Future[Any]]


def call_function(function: Forward, rows: Floats) -> Future[Any]:
    """Call the function; return a future that is done."""
    done: Future[Any] = Future()
    done.set_result(function(rows))
    return done


def started_evaluator(model_file: Path, folder: Path, settings: dict[str, Any], stack: ExitStack) -> Evaluator:
    """Return an evaluator with the serving model."""
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(parents=True)
    shutil.copyfile(model_file, checkpoints / "model_1.keras")
    source = FolderSource(checkpoints, folder / "staging")
    chosen = EvaluatorSettings(state_dir=folder / "state", **settings)
    evaluator = stack.enter_context(Evaluator(chosen, source=source, observer=SilentObserver()))
    if not evaluator.wait_ready(READY_SECONDS):
        raise BenchmarkError(f"nothing was serving after {READY_SECONDS:.0f} s")
    return evaluator


def measure(submit: Submit, rows: Floats, *, callers: int, seconds: float) -> dict[str, Any]:
    """Keep ``callers`` requests in flight; return the latency of each that was answered after the warm-up."""
    began = time.perf_counter()
    counts_from, ends = began + WARM_UP_SECONDS, began + WARM_UP_SECONDS + seconds
    under_way: deque[tuple[float, Future[Any]]] = deque()
    latencies: list[float] = []
    answered = 0
    now = began
    while now < ends:
        while len(under_way) < callers:
            under_way.append((time.perf_counter(), submit(rows)))
        sent, future = under_way.popleft()
        future.result(ANSWER_SECONDS)
        now = time.perf_counter()
        answered += 1
        if now >= counts_from:
            latencies.append(round(1000 * (now - sent), 4))
    for _, future in under_way:
        future.result(ANSWER_SECONDS)
    return {"latencies_ms": latencies, "seconds": now - counts_from, "answered": answered + len(under_way)}


def main(kind: str, model_name: str, model_file: Path, folder: Path, settings: dict[str, Any]) -> None:
    """Load the model, then answer questions."""
    model = model_named(model_name)
    with ExitStack() as stack:
        if kind == "function":
            submit: Submit = partial(call_function, Forward(model_file))
        else:
            evaluator = started_evaluator(model_file, folder, settings, stack)

            def submit(rows: Floats) -> Future[Any]:
                return evaluator.predict({INPUT: rows})

        def answer(question: dict[str, Any]) -> dict[str, Any]:
            rows = model.rows(question["rows"])
            return measure(submit, rows, callers=question["callers"], seconds=question["seconds"])

        answer_questions(answer)


if __name__ == "__main__":
    pairs = (argument.split("=") for argument in sys.argv[5:])
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]), {name: int(value) for name, value in pairs})
