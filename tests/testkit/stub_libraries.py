"""Stub libraries in the layout of NVIDIA's wheels, built by the C compiler, for machines without the wheels."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from understudy.devices.cuda_libraries import LIBRARIES, CudaLibrary

COMPILER = shutil.which("cc")

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler to make libraries with")


def build(source: str, soname: str, folder: Path) -> Path:
    """Compile C to a shared library of this name."""
    assert COMPILER is not None
    folder.mkdir(parents=True, exist_ok=True)
    code = folder / "stub.c"
    code.write_text(source, encoding="ascii")
    file = folder / soname
    subprocess.run(
        [COMPILER, "-shared", "-fPIC", f"-Wl,-soname,{soname}", "-o", str(file), str(code)],
        check=True,
        timeout=60,
    )
    code.unlink()
    return file


def build_wheels(site: Path, libraries: Iterable[CudaLibrary] = LIBRARIES) -> None:
    """Create ``nvidia/<folder>/lib/<soname>`` for every library in a folder that stands for site-packages."""
    for library in libraries:
        build("int stub(void) { return 0; }", library.soname, site / "nvidia" / library.folder / "lib")


def lines_of(program: str, *arguments: str, libraries: Path) -> list[str]:
    """Run a Python program that finds the libraries of a folder first; return what it prints, by line."""
    completed = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "LD_LIBRARY_PATH": str(libraries)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout.splitlines()
