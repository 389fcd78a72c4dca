"""Prints the model that a server serves, and its prediction for two examples of zeros.

pip install understudy-client
python predict.py 127.0.0.1:8500

The variables UNDERSTUDY_TLS_CA, UNDERSTUDY_TLS_CERT, UNDERSTUDY_TLS_KEY and UNDERSTUDY_TOKEN_FILE name files, as for
the commands of understudy.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import grpc
import ml_dtypes  # noqa: F401 - teaches NumPy the name bfloat16
import numpy as np

from understudy.clients import Client


def file_in(variable: str) -> Path | None:
    """Return the file that a variable of the environment names, if any."""
    file = os.environ.get(f"UNDERSTUDY_{variable}")
    return Path(file) if file else None


def channel_credentials() -> grpc.ChannelCredentials | None:
    """Return the credentials for TLS; None to call without."""
    files = [file_in(variable) for variable in ("TLS_CA", "TLS_KEY", "TLS_CERT")]
    ca, key, certificate = (None if file is None else file.read_bytes() for file in files)
    return grpc.ssl_channel_credentials(ca, key, certificate) if ca else None


def main(target: str) -> None:
    """Print the model's metadata and its prediction for two examples."""
    with Client(target, credentials=channel_credentials(), token_file=file_in("TOKEN_FILE")) as client:
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
