"""Measures how soon a service is ready over a folder of many checkpoints, and how it handles the backlog.

    python -m benchmarks.many_checkpoints --count 10000 [--format run|keras] [--python PATH/OF/ANOTHER/python]

Creates one small checkpoint and derives the others from it: in a run folder by hard links with manifests rewritten for
their steps, in a folder of Keras files by another number in a weight. Then it starts ``understudy serve`` on it, twice,
and prints a JSON line each time. On a busy machine compare the CPU seconds from listening to ready with those of
``--count 1``.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import h5py
import keras
import numpy as np

from understudy.checkpoints import CheckpointPublisher, RunDir
from understudy.checkpoints.keras_signature import signature_of
from understudy.checkpoints.layout import MANIFEST_FILE, MODEL_FILE
from understudy.checkpoints.manifest import encode_manifest, read_manifest

_TIMEOUT_SECONDS = 900.0
_STILL_SECONDS = 20.0
_READY = re.compile(r"READY grpc=\S+ http=\S+ step=(\d+)")


def build_model() -> keras.Model:
    """Return a compiled model of one layer."""
    model = keras.Sequential([keras.Input((4,), name="x"), keras.layers.Dense(3, name="y")])
    model.compile("sgd", "mse")
    return model


def fill_run(folder: Path, count: int) -> None:
    """Publish one checkpoint, and link its files under other steps."""
    run, model = RunDir(folder), build_model()
    publisher = CheckpointPublisher(run, keep=count)
    publisher.publish(
        1,
        lambda to: model.save(to / MODEL_FILE),
        epoch=None,
        final=False,
        metrics={"loss": 1.0},
        signature=signature_of(model),
    )
    original = run.checkpoint(1)
    manifest = read_manifest(original)
    for step in range(2, count + 1):
        to = run.checkpoint(step)
        to.mkdir()
        os.link(original / MODEL_FILE, to / MODEL_FILE)
        (to / MANIFEST_FILE).write_bytes(encode_manifest(replace(manifest, step=step)))


def fill_folder(folder: Path, count: int) -> None:
    """Save one Keras file, and others with another number in a weight."""
    folder.mkdir()
    first = folder / "model-000001.keras"
    build_model().save(first)
    with zipfile.ZipFile(first) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    now = time.time() - count
    for step in range(1, count + 1):
        weights = io.BytesIO(members["model.weights.h5"])
        with h5py.File(weights, "r+") as file:
            file["layers/dense/vars/1"][0] = step
        path = folder / f"model-{step:06d}.keras"
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in {**members, "model.weights.h5": weights.getvalue()}.items():
                archive.writestr(name, content)
        os.utime(path, (now + step, now + step))


def measure(python: str, arguments: list[str], state: Path) -> dict[str, float]:
    """Start a service, wait until it is ready and takes no more leases, then end it."""
    command = [python, "-m", "understudy.cli", "serve", *arguments, f"--state-dir={state}"]
    command += ["--grpc-port=0", "--http-port=0"]
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("LISTENING"):
                    listening, cpu = time.monotonic(), _cpu_seconds(process.pid)
                if match := _READY.match(line):
                    return {
                        "listening_seconds": round(listening - began, 2),
                        "ready_seconds_later": round(time.monotonic() - listening, 2),
                        "cpu_seconds_later": round(_cpu_seconds(process.pid) - cpu, 2),
                        "step": int(match[1]),
                        **_held(state, listening),
                    }
                if time.monotonic() - began > _TIMEOUT_SECONDS:
                    break
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()
    raise RuntimeError("the service did not become ready")


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _held(state: Path, began: float) -> dict[str, float]:
    pinned, before, changed = state / "pinned", -1, time.monotonic()
    while (count := sum(1 for _ in pinned.iterdir())) != before or time.monotonic() - changed < _STILL_SECONDS:
        if count != before:
            before, changed = count, time.monotonic()
        time.sleep(0.5)
    return {"held": before, "held_seconds_later": round(changed - began, 2)}


def main() -> None:
    """Run the measurement that the command line selects."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--format", choices=("run", "keras"), default="run")
    parser.add_argument("--python", default=sys.executable, help="The interpreter whose understudy to measure.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "checkpoints"
        (fill_run if options.format == "run" else fill_folder)(folder, options.count)
        flag = "--run-dir" if options.format == "run" else "--checkpoints"
        for start in ("first", "restart"):
            data = Path(temporary) / "data.npz"
            np.savez(data, x=np.zeros((4, 4), np.float32), y=np.zeros((4, 3), np.float32))
            measured = measure(
                options.python, [f"{flag}={folder}", f"--eval-data=test={data}"], Path(temporary) / "state"
            )
            print(json.dumps({"count": options.count, "format": options.format, "start": start, **measured}))


if __name__ == "__main__":
    main()
