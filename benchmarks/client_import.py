"""Measures ``import understudy.clients`` beyond the import of numpy, grpc and protobuf.

Fresh interpreters import one and the other alternately; the result is the difference of the medians. The limit is
50 ms on an idle machine; on a busy one, read the CPU time.

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
_TIMED = (
    "import time; wall, cpu = time.perf_counter(), time.process_time(); {statement}; "
    "print(time.perf_counter() - wall, time.process_time() - cpu)"
)


def import_milliseconds(python: str, statement: str) -> tuple[float, float]:
    """Return the wall time and CPU time of a statement in a fresh interpreter."""
    program = _TIMED.format(statement=statement)
    completed = subprocess.run([python, "-I", "-c", program], capture_output=True, text=True, timeout=60, check=True)
    wall, cpu = map(float, completed.stdout.split())
    return 1000 * wall, 1000 * cpu


def measure(python: str, runs: int) -> dict[str, float]:
    """Return the medians in milliseconds of ``runs`` interpreters each, after one that warms the file cache."""
    import_milliseconds(python, CLIENT)
    pairs = [(import_milliseconds(python, BASE), import_milliseconds(python, CLIENT)) for _ in range(runs)]
    base_wall, base_cpu = (statistics.median(times) for times in zip(*(base for base, _ in pairs), strict=True))
    wall, cpu = (statistics.median(times) for times in zip(*(client for _, client in pairs), strict=True))
    return {
        "runs": runs,
        "base_wall_ms": round(base_wall, 1),
        "base_cpu_ms": round(base_cpu, 1),
        "above_wall_ms": round(wall - base_wall, 1),
        "above_cpu_ms": round(cpu - base_cpu, 1),
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
    print(f"medians of {result['runs']} interpreters             wall ms   CPU ms")
    print(f"numpy, grpc and protobuf             {result['base_wall_ms']:7.1f}  {result['base_cpu_ms']:7.1f}")
    print(f"understudy.clients above that        {result['above_wall_ms']:7.1f}  {result['above_cpu_ms']:7.1f}")
    print(f"allowed                              {result['allowed_ms']:7.1f}")


if __name__ == "__main__":
    main()
