"""Files are inspected in processes with limits, which a file can end or exhaust without harm."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from testkit.polling import polled
from understudy.checkpoints import DamagedCheckpointError, ModelKind
from understudy.checkpoints.folder_source import FolderSource
from understudy.checkpoints.inspection import inspect_content, inspect_structure, inspector
from understudy.checkpoints.inspection.bounds import parse_json

from .conftest import WriteKeras

PATIENCE_SECONDS = 60


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[inspector._Pool]:
    """Give this test its own processes: those that earlier tests left may be forks, which other signals reach."""
    pool = inspector._Pool()
    monkeypatch.setattr(inspector, "_POOL", pool)
    yield pool
    pool.close()


def apart(work: str, **limits: int) -> dict[str, Any]:
    """Run a Python expression in a limited fork of a new process; return the answer."""
    program = (
        "import os, signal, sys, time\n"
        "from understudy.checkpoints.inspection.limits import Limits\n"
        "from understudy.checkpoints.inspection.worker import run_limited\n"
        f"limits = Limits(**{ {'seconds': 20, 'wall_seconds': 60, 'memory_bytes': 2**28, **limits}!r})\n"
        f"print(run_limited(lambda: {work}, limits).decode())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=PATIENCE_SECONDS, check=True)
    return dict(json.loads(done.stdout))


def test_a_result_is_handed_over() -> None:
    assert apart("{'digest': 'abc'}") == {"found": {"digest": "abc"}}


def test_more_memory_than_the_limit_is_damage() -> None:
    assert "bytes of memory" in apart("{'size': len(bytes(2**29))}")["damage"]


def test_an_endless_loop_ends_with_the_time() -> None:
    assert apart("any(iter(int, 1))", seconds=1)["signal"] == signal.SIGXCPU


def test_an_endless_wait_ends_with_the_time() -> None:
    assert apart("signal.pause()", wall_seconds=1)["signal"] == signal.SIGALRM


def test_a_crash_is_an_answer() -> None:
    assert apart("os.abort()") == {"signal": signal.SIGABRT}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_signal_that_a_scheduler_sends_says_nothing_about_the_file(
    tmp_path: Path, write_keras: WriteKeras, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    path = write_keras(tmp_path / "model.keras")
    monkeypatch.setattr(inspector._Worker, "ask", lambda *_: apart(f"os.kill(os.getpid(), {int(number)})"))
    with pytest.raises(OSError, match="was killed"):
        inspect_content(ModelKind.KERAS, path)


def test_no_file_can_be_written(tmp_path: Path) -> None:
    target = tmp_path / "file"

    answer = apart(f"__import__('pathlib').Path({str(target)!r}).write_text('x')")

    assert "File too large" in answer["damage"]
    assert target.stat().st_size == 0


def test_a_missing_file_is_no_damage(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        inspect_content(ModelKind.HDF5, tmp_path / "model.h5")


def test_a_worker_that_died_is_replaced(tmp_path: Path, write_keras: WriteKeras, pool: inspector._Pool) -> None:
    path = write_keras(tmp_path / "model.keras")
    inspect_content(ModelKind.KERAS, path)
    worker = pool._borrow()
    worker._process.kill()
    worker._process.wait(PATIENCE_SECONDS)
    pool._return(worker)

    assert inspect_content(ModelKind.KERAS, path)["digest"]


def test_a_worker_that_dies_meanwhile_is_the_machine_s_fault(tmp_path: Path, write_keras: WriteKeras) -> None:
    worker = inspector._Worker()
    limits = {"seconds": 20, "wall_seconds": 60, "memory_bytes": 2**30, "written_bytes": 0}
    path = write_keras(tmp_path / "model.keras")
    worker._process.send_signal(signal.SIGSTOP)
    killer = threading.Timer(0.05, worker._process.kill)
    killer.start()
    try:
        with pytest.raises(OSError, match="was killed"):
            worker.ask({"kind": "keras", "path": str(path), "content": True, "limits": limits}, PATIENCE_SECONDS)
    finally:
        killer.join()
        worker.close()


def test_a_machine_too_busy_to_read_a_file_says_nothing_about_it_and_it_is_read_later(
    tmp_path: Path,
    write_keras: WriteKeras,
    pool: inspector._Pool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    write_keras(theirs / "model-1.keras", iterations=1)
    later = iter(range(100))
    source = FolderSource(theirs, tmp_path / "staging", clock=lambda: float(next(later)))
    worker = pool._borrow()
    os.kill(worker._process.pid, signal.SIGSTOP)
    pool._return(worker)
    with monkeypatch.context() as patch:
        patch.setattr(inspector, "_PATIENCE", 0.01)
        assert polled(source) == []
    assert "a checkpoint is to be read again" in caplog.text
    assert len(polled(source)) == 1


def test_two_threads_inspect_at_the_same_time(tmp_path: Path, write_keras: WriteKeras) -> None:
    paths = [write_keras(tmp_path / f"{number}.keras", weight=float(number)) for number in range(3)]
    found: dict[Path, str] = {}
    threads = [
        threading.Thread(
            target=lambda path=path: found.update({path: inspect_content(ModelKind.KERAS, path)["digest"]})
        )
        for path in paths
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)

    assert len(set(found.values())) == len(paths)
    assert len(inspector._POOL._idle) <= inspector._IDLE_WORKERS


def test_inspections_one_after_the_other_share_a_worker(
    tmp_path: Path, write_keras: WriteKeras, pool: inspector._Pool
) -> None:
    """Starting one takes a hundred times as long as an inspection."""
    path = write_keras(tmp_path / "model.keras")
    inspect_structure(ModelKind.KERAS, path)
    running = {worker._process.pid for worker in pool._idle}
    for _ in range(5):
        inspect_structure(ModelKind.KERAS, path)
    assert {worker._process.pid for worker in pool._idle} == running


def test_the_workers_end_with_their_process(tmp_path: Path, write_keras: WriteKeras) -> None:
    path = write_keras(tmp_path / "model.keras")
    program = (
        "import os\n"
        "from pathlib import Path\n"
        "from understudy.checkpoints import ModelKind\n"
        "from understudy.checkpoints.inspection import inspect_structure, inspector\n"
        f"inspect_structure(ModelKind.KERAS, Path({str(path)!r}))\n"
        "print(inspector._POOL._idle[0]._process.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=PATIENCE_SECONDS, check=False)
    worker = int(done.stdout)
    give_up_at = time.monotonic() + PATIENCE_SECONDS
    while _runs(worker) and time.monotonic() < give_up_at:
        time.sleep(0.01)

    assert not _runs(worker)


def _runs(pid: int) -> bool:
    """Return whether a process runs; one whose parent is gone may stay as a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_compressed_files_are_read_within_the_bounds(tmp_path: Path) -> None:
    path = tmp_path / "model.weights.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("layer/vars/0", data=np.arange(10_000), compression="gzip", shuffle=True)

    assert inspect_content(ModelKind.WEIGHTS, path)["digest"]


def test_a_name_of_half_a_character_is_damage() -> None:
    parse_json(b'{"name": "\\ud83d\\ude00"}', "config.json")
    with pytest.raises(ValueError, match="surrogates not allowed"):
        parse_json(b'{"name": "\\ud83d"}', "config.json")
    with pytest.raises(ValueError, match="codec can't decode"):
        parse_json('{"name": "\\ud83d"}'.encode("utf-16"), "config.json")


def test_a_file_of_another_program_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "model.weights.h5"
    path.write_bytes(os.urandom(100))

    with pytest.raises(DamagedCheckpointError, match=r"model\.weights\.h5 is not a whole \.weights\.h5 file"):
        inspect_content(ModelKind.WEIGHTS, path)


def test_nothing_is_limited_in_this_process() -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
