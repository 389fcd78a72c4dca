"""Prints the model that a server serves, and its prediction for two examples of zeros.

pip install understudy-client
python predict.py 127.0.0.1:8500
"""

from __future__ import annotations

import sys

import ml_dtypes  # noqa: F401 - teaches NumPy the name bfloat16
import numpy as np

from understudy.clients import Client


def main(target: str) -> None:
    """Print the model's metadata and its prediction for two examples."""
    with Client(target) as client:
        metadata = client.metadata()
        print(f"{metadata.model_name}, step {metadata.step}")
        rows = {}
        for spec in metadata.inputs:
            shape = [2, *(1 if length is None else length for length in spec.shape[1:])]
            rows[spec.name] = np.full(shape, b"") if spec.dtype == "string" else np.zeros(shape, spec.dtype)
        result = client.predict(rows)
        for name, output in result.outputs.items():
            print(f"{name}, computed at step {result.step}:\n{output}")


if __name__ == "__main__":
    main(*sys.argv[1:] or ["127.0.0.1:8500"])
