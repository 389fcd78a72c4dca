"""The architecture page names the files that there are, and those that a Predict runs through."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from testkit.checkpoints import Chief
from testkit.in_process import running_service

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
SOURCES = [path for layer in ROOT.glob("*/understudy") for path in layer.rglob("*.py")]
THREADS = {"service-under-test", "understudy-device"}
"""Those of the event loop and of the devices, on which requests are served."""
TIMES = 20


def named_files(text: str) -> Iterator[str]:
    """Yield the Python files named in backticks; a name without a folder is in the folder that was named before."""
    folder = ""
    for name in re.findall(r"`([\w/]+(?:\.py|/))`", text):
        before, _, last = name.rpartition("/")
        folder = before or folder
        if last:
            yield f"{folder}/{last}"


def source_of(name: str) -> Path:
    """Return the file of this name, below a folder ``understudy`` or the root."""
    found = [path for path in SOURCES if path.as_posix().endswith(f"/understudy/{name}")]
    return found[0] if found else ROOT / name


@pytest.mark.parametrize("paragraph", re.split(r"\n\n|\n(?=\|)", PAGE))
def test_every_file_that_the_architecture_page_names_is_there(paragraph: str) -> None:
    assert [name for name in named_files(paragraph) if not source_of(name).is_file()] == []


def test_every_package_that_the_architecture_page_names_is_there() -> None:
    names = re.findall(r"`((?:service|evaluator|checkpoints|experiments|tests)/[\w/]*?)/?`", PAGE)

    assert len(names) > 5
    assert [name for name in names if not ((ROOT / name).is_dir() or source_of(f"{name}/__init__.py").is_file())] == []


@contextmanager
def files_run_through() -> Iterator[set[Path]]:
    """Yield a set that receives the files of the functions that `THREADS` call; start them inside."""
    files: set[Path] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and threading.current_thread().name in THREADS:
            files.add(Path(frame.f_code.co_filename))

    threading.setprofile(note)
    try:
        yield files
    finally:
        threading.setprofile(None)


def test_a_predict_runs_through_the_files_of_the_table_and_no_other(
    logical_cpus: tuple[str, ...], tmp_path: Path
) -> None:
    chief = Chief(tmp_path / "run")
    chief.publish(10)
    section = PAGE.partition("## A Predict request")[2].partition("##")[0]
    rows = re.findall(r"^\| \d\. .*\| (.*?) \|$", section, re.MULTILINE)
    table = {source_of(name) for row in rows for name in named_files(row.partition(";")[0])}
    replicas, state_dir = logical_cpus[:2], tmp_path / "state"

    with (
        files_run_through() as files,
        running_service({"run_dir": tmp_path / "run"}, {}, replicas=replicas, state_dir=state_dir) as service,
    ):
        service.wait_ready()
        client = service.client()
        for _ in range(TIMES):
            client.predict(np.zeros((2, 4), np.float32))
        run_through = set(SOURCES)
        for _ in range(TIMES):
            files.clear()
            client.predict(np.zeros((2, 4), np.float32))
            run_through &= files  # what runs now and then on the same threads is not in all of them

    assert len(rows) == 8
    assert run_through == table
    assert f"these are {len(table)} files" in PAGE
