"""What ``import understudy.clients`` costs above importing numpy, grpc and protobuf.

Fresh interpreters import one and the other by turns; the difference of the medians is the answer. At most 50 ms are
allowed.

    python benchmarks/client_import.py [--runs 21] [--python PATH] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

ALLOWED_MILLISECONDS = 50.0
BASE = "import numpy, grpc, google.protobuf.message"
CLIENT = f"{BASE}; import understudy.clients"
_TIMED = "import time; start = time.perf_counter(); {statement}; print(time.perf_counter() - start)"


def import_milliseconds(python: str, statement: str) -> float:
    """Return how long a statement takes in a fresh interpreter."""
    program = _TIMED.format(statement=statement)
    completed = subprocess.run([python, "-I", "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return 1000 * float(completed.stdout)


def measure(python: str, runs: int) -> dict[str, float]:
    """Return the medians in milliseconds of ``runs`` interpreters each, after one that warms the file cache."""
    import_milliseconds(python, CLIENT)
    pairs = [(import_milliseconds(python, BASE), import_milliseconds(python, CLIENT)) for _ in range(runs)]
    base, client = (statistics.median(times) for times in zip(*pairs, strict=True))
    return {
        "runs": runs,
        "numpy_grpc_protobuf_ms": round(base, 1),
        "with_clients_ms": round(client, 1),
        "above_ms": round(client - base, 1),
        "allowed_ms": ALLOWED_MILLISECONDS,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=21, help="interpreters of each kind")
    parser.add_argument("--python", default=sys.executable, help="the interpreter, such as a client-only venv's")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    result = measure(arguments.python, arguments.runs)
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"numpy, grpc and protobuf: {result['numpy_grpc_protobuf_ms']:.1f} ms, median of {result['runs']}")
    print(f"and understudy.clients:   {result['with_clients_ms']:.1f} ms")
    print(f"so the client costs:      {result['above_ms']:.1f} ms of {result['allowed_ms']:.0f} allowed")


if __name__ == "__main__":
    main()
