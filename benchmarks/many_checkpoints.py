"""Measures how soon a service is ready over a folder of many checkpoints.

    python -m benchmarks.many_checkpoints --count 10000 [--format run|keras|unnumbered] [--python ANOTHER/python]

Creates one small checkpoint and derives the others from it: in a run folder by hard links with manifests rewritten for
their steps, in a folder of Keras files by another number in a weight, with a number in each name or without one. Then
it starts ``understudy serve`` on one checkpoint, once, and on all, twice, for some seconds each, and prints a JSON line
each time. The results of all formats are written to ``benchmarks/results/many_checkpoints.json``, with the time that
only importing TensorFlow and Keras takes. No start can take less. On a busy machine compare CPU seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import h5py
import keras
import numpy as np

from understudy.checkpoints import CheckpointPublisher, RunDir
from understudy.checkpoints.keras_signature import signature_of
from understudy.checkpoints.layout import LEASES_DIR, MANIFEST_FILE, MODEL_FILE
from understudy.checkpoints.manifest import encode_manifest, read_manifest

_TIMEOUT_SECONDS = 900.0
_BACKLOG_SECONDS = 20.0
"""How long a service works on its backlog, so that the next start finds leases."""
_LINKS = 20_000
"""How many links of one file there are, besides the leases."""
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
    original = run.checkpoint(1) / MODEL_FILE
    manifest = read_manifest(original.parent)
    for step in range(2, count + 1):
        to = run.checkpoint(step)
        to.mkdir()
        if step % _LINKS == 0:
            shutil.copy(original, to / MODEL_FILE)
            original = to / MODEL_FILE
        else:
            os.link(original, to / MODEL_FILE)
        (to / MANIFEST_FILE).write_bytes(encode_manifest(replace(manifest, step=step)))


def fill_folder(folder: Path, count: int, *, numbered: bool = True) -> None:
    """Save Keras files, each with another number in a weight, and in its name if `numbered`."""
    folder.mkdir()
    first = folder.with_name("first.keras")
    build_model().save(first)
    with zipfile.ZipFile(first) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    now = time.time() - count
    for step in range(1, count + 1):
        weights = io.BytesIO(members["model.weights.h5"])
        with h5py.File(weights, "r+") as file:
            file["layers/dense/vars/1"][0] = step
        path = folder / (f"model-{step:06d}.keras" if numbered else f"model_{_letters(step)}.keras")
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in {**members, "model.weights.h5": weights.getvalue()}.items():
                archive.writestr(name, content)
        os.utime(path, (now + step, now + step))


def _letters(number: int) -> str:
    """Return five letters that no other number below 26^5 has, in no order."""
    scattered = number * 7_919 % 26**5
    return "".join(chr(ord("a") + scattered // 26**place % 26) for place in range(5))


def import_seconds(python: str, modules: str) -> dict[str, float]:
    """Return the wall-clock and the processor time of a process that only imports modules."""
    began = time.monotonic()
    with subprocess.Popen([python, "-c", f"import {modules}"], stderr=subprocess.DEVNULL) as process:
        _, _, usage = os.wait4(process.pid, 0)
        process.returncode = 0
    return {
        "seconds": round(time.monotonic() - began, 2),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 2),
    }


def measure(python: str, arguments: list[str], state: Path) -> dict[str, float]:
    """Start a service, wait until it is ready, leave it to its backlog for some time, and end it.

    All times are since the start of the process.
    """
    command = [python, "-m", "understudy.cli", "serve", *arguments, f"--state-dir={state}"]
    command += ["--grpc-port=0", "--http-port=0"]
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("LISTENING"):
                    listening = time.monotonic()
                if match := _READY.match(line):
                    result = {
                        "ready_seconds": round(time.monotonic() - began, 2),
                        "ready_cpu_seconds": round(_cpu_seconds(process.pid), 2),
                        "listening_seconds": round(listening - began, 2),
                        "step": int(match[1]),
                    }
                    time.sleep(_BACKLOG_SECONDS)
                    return {**result, "leased": sum(1 for _ in (state / LEASES_DIR).iterdir())}
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


RESULTS = Path(__file__).parent / "results" / "many_checkpoints.json"

FORMATS: dict[str, tuple[str, Callable[[Path, int], None]]] = {
    "run": ("--run-dir", fill_run),
    "keras": ("--checkpoints", fill_folder),
    "unnumbered": ("--checkpoints", functools.partial(fill_folder, numbered=False)),
}
"""The flag that serves a folder of each format, and what fills one."""


def main() -> None:
    """Run the measurement that the command line selects."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--format", choices=tuple(FORMATS), default="run")
    parser.add_argument("--python", default=sys.executable, help="The interpreter whose understudy to measure.")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    flag, fill = FORMATS[options.format]
    result = json.loads(options.results.read_bytes()) if options.results.exists() else {}
    result["import"] = import_seconds(options.python, "tensorflow, keras")
    with tempfile.TemporaryDirectory() as temporary:
        data = Path(temporary) / "data.npz"
        np.savez(data, x=np.zeros((4, 4), np.float32), y=np.zeros((4, 3), np.float32))
        for count, starts in ((1, ("first",)), (options.count, ("first", "restart"))):
            folder, state = (Path(temporary) / f"{name}-{count}" for name in ("checkpoints", "state"))
            fill(folder, count)
            for start in starts:
                measured = measure(options.python, [f"{flag}={folder}", f"--eval-data=test={data}"], state)
                print(json.dumps({"format": options.format, "count": count, "start": start, **measured}))
                result[f"{options.format}, {count} checkpoints, {start} start"] = measured
                options.results.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
