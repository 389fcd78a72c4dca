"""Measures the CPU time of a prediction behind the transport. Run it under a profiler to see the parts.

    python -m benchmarks.profile_request_path [--rows 1 32] [--seconds 1] [--output FILE.json]

Everything runs in this process, on the MLP of the server comparison, without a wire. The cost of a front end is the
difference to the CPU seconds per request of ``python -m benchmarks.speed closed_loop``. The load is a closed loop of
coroutines and includes the contention between threads.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.speed import wire
from benchmarks.speed.models import INPUT, MODELS
from benchmarks.speed.programs.in_process import started_evaluator
from understudy.evaluator import Evaluator, EvaluatorSettings
from understudy.service.calls.methods import CallContext
from understudy.service.calls.metrics import new_registry
from understudy.service.evaluator_metrics import InferenceStatistics, ServiceObserver
from understudy.service.handlers.inference_handler import InferenceHandler
from understudy.service.handlers.prediction_handler import PredictionHandler
from understudy.service.readiness import Readiness
from understudy.service.served_model import Predictor, ServedModel
from understudy.service.templates.codecs import template_codecs
from understudy.v1 import prediction_pb2
from understudy.wire import encode

MODEL = MODELS["mlp"]
STREAM_DEPTH = 64
CALLERS = (1, 8, 64)
MICROSECONDS = 1e6

Answer = Callable[[bytes], Any]


class Stand:
    """The handlers before an evaluator. Belongs to the event loop that created it."""

    def __init__(self, evaluator: Evaluator, settings: EvaluatorSettings, statistics: InferenceStatistics) -> None:
        self.evaluator = evaluator
        model = ServedModel(name=MODEL.name, evaluator=evaluator)
        predictor = Predictor(evaluator)
        self.inference = InferenceHandler(
            model,
            predictor,
            settings=settings,
            statistics=statistics,
            readiness=Readiness(),
            stream_depth=STREAM_DEPTH,
            executor=ThreadPoolExecutor(1),
        )
        self.prediction = PredictionHandler(model, predictor, stream_depth=STREAM_DEPTH)
        self._codecs = template_codecs()

    async def model_infer(self, data: bytes) -> bytes:
        """Answer one request of the Open Inference Protocol."""
        codec = self._codecs.infer
        return codec.encode(await self.inference.model_infer(codec.decode(data), CallContext(deadline=None)))

    async def predict(self, data: bytes) -> bytes:
        """Answer one request of understudy.v1."""
        codec = self._codecs.predict
        return codec.encode(await self.prediction.predict(codec.decode(data), CallContext(deadline=None)))


@contextmanager
def stand(folder: Path) -> Iterator[Callable[[], Stand]]:
    """Yield the handlers with the serving model."""
    MODEL.build().save(folder / "model.keras")
    statistics = InferenceStatistics()
    observer = ServiceObserver(new_registry(), statistics=statistics, on_record=lambda: None)
    settings = EvaluatorSettings(state_dir=folder / "state")
    with ExitStack() as stack:
        evaluator = started_evaluator(folder / "model.keras", folder, {}, stack, observer)
        yield lambda: Stand(evaluator, settings, statistics)


def requests(rows: int) -> tuple[bytes, bytes]:
    """Return the same examples as a request of either protocol."""
    predict = prediction_pb2.PredictRequest(inputs={INPUT: encode(MODEL.rows(rows))})
    return wire.request(MODEL, rows), predict.SerializeToString()


async def whole(answer: Answer, data: bytes, *, callers: int, seconds: float) -> dict[str, float]:
    """Keep this many requests in flight for this long; return the microseconds of CPU time per request."""
    answered = 0
    ends = time.perf_counter() + seconds

    async def ask() -> None:
        nonlocal answered
        while time.perf_counter() < ends:
            await answer(data)
            answered += 1

    process, loop, began = time.process_time(), time.thread_time(), time.perf_counter()
    await asyncio.gather(*(ask() for _ in range(callers)))
    return {
        "requests_per_second": answered / (time.perf_counter() - began),
        "cpu": (time.process_time() - process) / answered * MICROSECONDS,
        "cpu_of_the_event_loop": (time.thread_time() - loop) / answered * MICROSECONDS,
    }


async def profile(make: Callable[[], Stand], rows: int, seconds: float) -> dict[str, Any]:
    """Return the parts and the whole for one batch size."""
    on = make()
    infer_bytes, predict_bytes = requests(rows)
    found: dict[str, Any] = {}
    for name, answer, data in (("ModelInfer", on.model_infer, infer_bytes), ("Predict", on.predict, predict_bytes)):
        found[name] = {callers: await whole(answer, data, callers=callers, seconds=seconds) for callers in CALLERS}
    return found


def show(rows: int, found: dict[str, Any]) -> None:
    """Print the results, as Markdown."""
    print(f"\n| batch of {rows}, the handlers | requests/s | CPU, µs | of which event loop |\n|---|---|---|---|")
    for name in ("ModelInfer", "Predict"):
        for callers, one in found[name].items():
            figures = f"{one['requests_per_second']:.0f} | {one['cpu']:.0f} | {one['cpu_of_the_event_loop']:.0f}"
            print(f"| {name}, {callers} under way | {figures} |")


def main() -> None:
    """Profile, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--seconds", type=float, default=1.0, help="of each closed loop")
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    arguments = parser.parse_args()
    print(f"load: {', '.join(f'{load:.1f}' for load in os.getloadavg())} on {os.cpu_count()} cores")
    result: dict[str, Any] = {"load": os.getloadavg()}
    with tempfile.TemporaryDirectory() as folder, stand(Path(folder)) as make, asyncio.Runner() as runner:
        for rows in arguments.rows:
            result[str(rows)] = found = runner.run(profile(make, rows, arguments.seconds))
            show(rows, found)
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    main()
