"""Long trials that a test suite has no time for.

    python -m benchmarks.soak TOPIC [--count N] [--seed S] [--work DIR]

A topic goes on where it was broken off: it keeps its state in the work folder until it is done. Its result goes to
``benchmarks/results/soak_TOPIC.json`` after every part of it, so that a trial that was broken off shows how far it
came. The exit status is 0 if what was tried held, 1 if not.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

from benchmarks.soak.trial import Trial

TOPICS = {
    "exactness": "drawn streams of drawn models: each scores as on one device",
    "damage": "damaged checkpoints: none served, none ends the evaluator, the last good one goes on serving",
    "stock_writers": "stock Keras and TensorFlow saving at full speed: no failed save, no torn read",
    "fuzz": "fuzzed requests over every RPC and path: no crash, no INTERNAL, no hang, no growth in memory",
    "training_kills": "SIGKILLs and SIGTERMs of training tasks: bit-equal to an undisturbed one, all of it scored",
    "swaps": "swap after swap in every format: no more models alive than slots, and flat memory",
    "kills": "SIGKILLs of the evaluator during a run: every checkpoint exactly once in the ledger",
}
"""Each is a module of this package with a ``run(trial)``, and what it tries."""

RESULTS = Path(__file__).parent.parent / "results"


def main() -> int:
    """Run one topic."""
    listed = "\n".join(f"  {name:15}{text}" for name, text in TOPICS.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\ntopics:\n{listed}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("topic", choices=TOPICS, metavar="TOPIC", nargs="?")
    parser.add_argument("--list", action="store_true", help="only print the names of the topics")
    parser.add_argument("--count", type=int, help="how much to try; by default as much as the topic says")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is random")
    parser.add_argument("--work", type=Path, help="where to keep its state; by default a folder under /tmp")
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
        importlib.import_module(f"benchmarks.soak.{arguments.topic}").run(trial)
    except Exception as error:
        trial.broke_off(error)
        raise
    print(json.dumps(trial.result))
    return 0 if trial.result["held"] else 1


if __name__ == "__main__":
    sys.exit(main())
