"""Steps per second of the trainer's loop against Keras' ``fit``: the same model and data, side by side in one process.

``fit`` is measured with its defaults, and on one device also with as many steps per graph call as the loop has (on
several, Keras fails with that), on the input that its guide recommends:
``cache().shuffle().repeat().batch().prefetch()``. After a warm-up of each, rounds alternate; the medians are compared.
The goal is 1.2 times default ``fit``. Beside it is the CPU time of a step, which depends less on other load.

    python benchmarks/training_speed.py [--rounds 7] [--steps 200] [--output FILE.json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WANTED_RATIO = 1.2
STEPS_PER_CALL = 20
STRATEGIES: dict[str, dict[str, Any]] = {
    "one_device": {"strategy": "one_device"},
    "mirrored": {"strategy": "mirrored", "logical_cpus": 2},
}


@dataclass(frozen=True, kw_only=True)
class Round:
    """The time of one round of a contender."""

    steps_per_second: float
    cpu_ms_per_step: float


def measure(strategy: str, *, rounds: int, steps: int, batch: int) -> dict[str, Any]:
    """Measure one strategy in this process, whose devices it configures."""
    import tensorflow as tf

    from understudy.experiments import load_experiment
    from understudy.trainer import TrainSettings
    from understudy.trainer.job import TrainingJob
    from understudy.trainer.model import build_model
    from understudy.trainer.strategies import build_strategy

    experiment = load_experiment("digits")
    settings = TrainSettings(
        run_dir=Path(tempfile.gettempdir()),  # nothing is written
        steps=10**9,
        checkpoint_every=10**9,
        steps_per_call=STEPS_PER_CALL,
        global_batch_size=batch,
        **STRATEGIES[strategy],
    )
    scope = build_strategy(settings, None)
    job = TrainingJob(experiment, settings, scope)
    advances = job.run(0)
    examples: Any = experiment.training_data()
    shuffled = examples.cache().shuffle(job.plan.examples, seed=0).repeat()
    batches = shuffled.batch(batch, drop_remainder=True).prefetch(tf.data.AUTOTUNE)

    def loop() -> None:
        for _ in range(steps // STEPS_PER_CALL):
            next(advances)

    def fit(steps_per_execution: int) -> Callable[[], None]:
        with scope.scope():
            model = build_model(experiment, seed=0)
        model.steps_per_execution = steps_per_execution
        return lambda: model.fit(batches, steps_per_epoch=steps, shuffle=False, verbose=0)

    contenders = {"loop": loop, "fit": fit(1)}
    if scope.num_replicas_in_sync == 1:
        contenders[f"fit_{STEPS_PER_CALL}_steps_per_execution"] = fit(STEPS_PER_CALL)
    measured = _alternate(contenders, rounds=rounds, steps=steps)
    medians = {name: _median(rounds) for name, rounds in measured.items()}
    return {
        "strategy": strategy,
        "batch": batch,
        "medians": medians,
        "times_as_fast_as": {
            name: round(medians["loop"]["steps_per_second"] / median["steps_per_second"], 2)
            for name, median in medians.items()
            if name != "loop"
        },
        "rounds": {name: [round(one.steps_per_second, 1) for one in rounds] for name, rounds in measured.items()},
    }


def _alternate(contenders: dict[str, Callable[[], None]], *, rounds: int, steps: int) -> dict[str, list[Round]]:
    measured: dict[str, list[Round]] = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            run = contenders[name]
            began, cpu_before = time.perf_counter(), time.process_time()
            run()
            seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_before
            if number > 0:
                took = Round(steps_per_second=steps / seconds, cpu_ms_per_step=1000 * cpu_seconds / steps)
                measured[name].append(took)
    return measured


def _median(rounds: list[Round]) -> dict[str, float]:
    return {
        "steps_per_second": round(statistics.median(one.steps_per_second for one in rounds), 1),
        "cpu_ms_per_step": round(statistics.median(one.cpu_ms_per_step for one in rounds), 2),
    }


def main() -> None:
    """Measure every strategy in its own process, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=200, help="steps in a round")
    parser.add_argument("--batch", type=int, default=32, help="examples in a global batch")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "training_speed.json")
    parser.add_argument("--only", choices=STRATEGIES, help="measure one in this process, and print it as JSON")
    arguments = parser.parse_args()
    options = {"rounds": arguments.rounds, "steps": arguments.steps, "batch": arguments.batch}
    if arguments.only:
        warnings.simplefilter("ignore")
        print(json.dumps(measure(arguments.only, **options)))
        return
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    results = [_measure_apart(strategy, flags) for strategy in STRATEGIES]
    report = {"wanted_ratio": WANTED_RATIO, "load_average": round(os.getloadavg()[0], 1), "results": results}
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    for result in results:
        print(f"{result['strategy']}, batches of {result['batch']}")
        for name, median in result["medians"].items():
            ratio = result["times_as_fast_as"].get(name)
            compared = f"  the loop is {ratio:.2f} times as fast" if ratio else ""
            rate, cpu = median["steps_per_second"], median["cpu_ms_per_step"]
            print(f"  {name:28} {rate:8.1f} steps/s  {cpu:6.2f} ms of CPU a step{compared}")


def _measure_apart(strategy: str, flags: list[str]) -> Any:
    command = [sys.executable, __file__, "--only", strategy, *flags]
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}
    ended = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, timeout=1800, check=True)
    return json.loads(ended.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
