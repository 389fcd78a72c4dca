"""Steps per second of the trainer's loop against Keras' ``fit``: the same model and data, side by side in one process.

After a warm-up of each, rounds of one and the other by turns; the medians are compared. At least 1.2 times is wanted.

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
from pathlib import Path
from typing import Any

WANTED_RATIO = 1.2
STEPS_PER_CALL = 20
STRATEGIES: dict[str, dict[str, Any]] = {
    "one_device": {"strategy": "one_device"},
    "mirrored": {"strategy": "mirrored", "logical_cpus": 2},
}


def measure(strategy: str, *, rounds: int, steps: int, batch: int) -> dict[str, Any]:
    """Measure one strategy in this process, whose devices it lays out."""
    from understudy.experiments import load_experiment
    from understudy.trainer import TrainSettings
    from understudy.trainer.batches import global_batches
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
    with scope.scope():
        model = build_model(experiment, seed=0)
    batches = global_batches(experiment.training_data(), job.plan, first_step=0)

    def loop() -> None:
        for _ in range(steps // STEPS_PER_CALL):
            next(advances)

    def fit() -> None:
        model.fit(batches, steps_per_epoch=steps, shuffle=False, verbose=0)

    rates = _alternate({"loop": loop, "fit": fit}, rounds=rounds, steps=steps)
    medians = {name: round(statistics.median(values), 1) for name, values in rates.items()}
    return {
        "strategy": strategy,
        "batch": batch,
        "steps_per_second": medians,
        "ratio": round(medians["loop"] / medians["fit"], 2),
        "rounds": {name: [round(value, 1) for value in values] for name, values in rates.items()},
    }


def _alternate(contenders: dict[str, Callable[[], None]], *, rounds: int, steps: int) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for counted in (False, *[True] * rounds):
        for name, run in contenders.items():
            began = time.perf_counter()
            run()
            if counted:
                rates[name].append(steps / (time.perf_counter() - began))
    return rates


def main() -> None:
    """Measure every strategy in a process of its own, and print."""
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
    report = {"wanted_ratio": WANTED_RATIO, "load_average": os.getloadavg()[0], "results": results}
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    for result in results:
        rates = result["steps_per_second"]
        print(
            f"{result['strategy']:12} loop {rates['loop']:8.1f}  fit {rates['fit']:8.1f}  {result['ratio']:.2f} times"
        )


def _measure_apart(strategy: str, flags: list[str]) -> Any:
    command = [sys.executable, __file__, "--only", strategy, *flags]
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}
    ended = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, timeout=1800, check=True)
    return json.loads(ended.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
