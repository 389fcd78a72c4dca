"""Steps per second of the trainer's loop against Keras' ``fit``: the same model and data, side by side in one process.

``fit`` is measured with its defaults, and on one device also with as many steps per graph call as the loop has (on
several, Keras fails with that), on the input that its guide recommends:
``cache().shuffle().repeat().batch().prefetch()``. After a warm-up of each, rounds alternate; the medians are compared.
The goal is 1.2 times default ``fit``. Beside it is the CPU time of a step, which depends less on other load.

    python benchmarks/training_speed.py [--rounds 7] [--output FILE.json]
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS, BATCH, STEPS_PER_CALL = 200, 32, 20
STRATEGIES: dict[str, dict[str, Any]] = {
    "one_device": {"strategy": "one_device"},
    "mirrored": {"strategy": "mirrored", "logical_cpus": 2},
}


def measure(strategy: str, *, rounds: int) -> dict[str, Any]:
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
        global_batch_size=BATCH,
        **STRATEGIES[strategy],
    )
    scope = build_strategy(settings, None)
    job = TrainingJob(experiment, settings, scope)
    advances = job.run(0)
    examples: Any = experiment.training_data()
    shuffled = examples.cache().shuffle(job.plan.examples, seed=0).repeat()
    batches = shuffled.batch(BATCH, drop_remainder=True).prefetch(tf.data.AUTOTUNE)

    def loop() -> None:
        for _ in range(STEPS // STEPS_PER_CALL):
            next(advances)

    def fit(steps_per_execution: int) -> Callable[[], None]:
        with scope.scope():
            model = build_model(experiment, seed=0)
        model.steps_per_execution = steps_per_execution
        return lambda: model.fit(batches, steps_per_epoch=STEPS, shuffle=False, verbose=0)

    contenders = {"loop": loop, "fit": fit(1)}
    if scope.num_replicas_in_sync == 1:
        contenders[f"fit_{STEPS_PER_CALL}_steps_per_execution"] = fit(STEPS_PER_CALL)
    measured = _alternate(contenders, rounds)
    medians = {name: _median(rounds) for name, rounds in measured.items()}
    return {
        "strategy": strategy,
        "batch": BATCH,
        "medians": medians,
        "times_as_fast_as": {
            name: round(medians["loop"]["steps_per_second"] / median["steps_per_second"], 2)
            for name, median in medians.items()
            if name != "loop"
        },
        "rounds": {name: [round(rate, 1) for rate, _ in rounds] for name, rounds in measured.items()},
    }


def _alternate(contenders: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return the steps per second and the milliseconds of CPU per step of each round."""
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            began, cpu_before = time.perf_counter(), time.process_time()
            contenders[name]()
            seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_before
            if number > 0:
                measured[name].append((STEPS / seconds, 1000 * cpu_seconds / STEPS))
    return measured


def _median(rounds: list[tuple[float, float]]) -> dict[str, float]:
    rate, cpu = (statistics.median(values) for values in zip(*rounds, strict=True))
    return {"steps_per_second": round(rate, 1), "cpu_ms_per_step": round(cpu, 2)}


def main() -> None:
    """Measure every strategy in its own process, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "training_speed.json")
    parser.add_argument("--only", choices=STRATEGIES, help="measure one in this process, and print it as JSON")
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(measure(arguments.only, rounds=arguments.rounds)))
        return
    results = [_measure_apart(strategy, arguments.rounds) for strategy in STRATEGIES]
    report = {"wanted_ratio": 1.2, "load_average": round(os.getloadavg()[0], 1), "results": results}
    text = json.dumps(report, indent=2)
    arguments.output.write_text(text + "\n")
    print(text)


def _measure_apart(strategy: str, rounds: int) -> Any:
    command = [sys.executable, __file__, "--only", strategy, "--rounds", str(rounds)]
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}
    ended = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, timeout=1800, check=True)
    return json.loads(ended.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
