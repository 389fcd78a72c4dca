"""Long trials, beyond the time of a test suite.

    python -m soak TOPIC [--count N] [--seed S] [--work DIR]

An interrupted topic resumes: it keeps its state in the work folder until it is done. Its result is written to
``benchmarks/results/soak_TOPIC.json`` after every part, so that an interrupted trial shows its progress. The exit
status is 0 if the trial held, 1 if not.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

from soak.trial import Trial

TOPICS = {
    "exactness": "drawn streams of drawn models: each scores as on one device",
    "coverage": "simulated evaluations: 92 to 97 % of the 95 % intervals contain the truth",
    "damage": "damaged and malicious checkpoints: none served, none ends the evaluator, the last good one serves on",
    "stock_writers": "stock Keras and TensorFlow saving at full speed: no failed save, no torn read",
    "attacks": "attacks and fuzzed requests beside an honest caller: it hardly waits, nothing is written or falsified",
    "training_kills": "SIGKILLs and SIGTERMs of training tasks: bit-equal to an undisturbed one, all of it scored",
    "swaps": "swap after swap in every format, or of architecture: no more models alive than slots, flat memory",
    "restarts": "rolling restarts of three servers under load, with clients that balance: no failed call",
    "fleet": "promotions and rollbacks of servers that follow, under load: no failed or torn answer",
    "standby": "SIGKILLs of one of two evaluators: the other serves within 30 s, every checkpoint once in the ledger",
    "cluster_faults": "killed and stopped workers, nodes that leave and join: scores have the bits of one device",
    "cluster_speed": "two nodes of one core each against one; how long evaluations stand still after faults",
    "polls": "polls and passes over up to 100,000 checkpoints: as quick as over ten unless something is new",
    "kills": "SIGKILLs of the evaluator during a run: every checkpoint exactly once in the ledger",
}
"""Each is a module of this package with a ``run(trial)``; the text says what it tries."""

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def main() -> int:
    """Run one topic."""
    listed = "\n".join(f"  {name:15}{text}" for name, text in TOPICS.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\ntopics:\n{listed}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("topic", choices=TOPICS, metavar="TOPIC", nargs="?")
    parser.add_argument("--list", action="store_true", help="only print the names of the topics")
    parser.add_argument("--count", type=int, help="number of cases; the topic's default if not given")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random numbers")
    parser.add_argument("--work", type=Path, help="folder for its state; by default under /tmp")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where to write the result")
    arguments = parser.parse_args()
    if arguments.list or arguments.topic is None:
        print(" ".join(TOPICS))
        return 0
    trial = Trial(
        topic=arguments.topic,
        count=arguments.count,
        seed=arguments.seed,
        work=arguments.work,
        results=arguments.results,
    )
    try:
        importlib.import_module(f"soak.{arguments.topic}").run(trial)
    except Exception as error:
        trial.broke_off(error)
        raise
    print(json.dumps(trial.result))
    return 0 if trial.result["held"] else 1


if __name__ == "__main__":
    sys.exit(main())
