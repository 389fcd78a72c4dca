"""CUDA's libraries are loaded from the wheels before TensorFlow opens them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from testkit.stub_libraries import build_wheels, needs_compiler
from understudy.devices.cuda_libraries import preload

FRAMEWORK = Path("tensorflow/libtensorflow_framework.so.2")

TRY_DLOPEN = """
import ctypes, sys
from understudy.devices.cuda_libraries import preload

framework = ctypes.CDLL(sys.argv[1])
# absl::Status tsl::internal::DsoLoader::TryDlopenCUDALibraries(); a status is a pointer, whose lowest bit says OK.
attempt = framework._ZN3tsl8internal9DsoLoader22TryDlopenCUDALibrariesEv
attempt.restype, attempt.argtypes = None, [ctypes.c_void_p]

if "preload" in sys.argv:
    print("missing:", *(fault.library.soname for fault in preload()))
status = ctypes.c_uint64()
attempt(ctypes.byref(status))
print("opened" if status.value == 1 else "refused")
"""
"""Asks TensorFlow's own loader. It keeps what it found, so each answer takes a process."""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Return a folder with TensorFlow's library in its place beside NVIDIA's wheels."""
    spec = importlib.util.find_spec("tensorflow")
    assert spec is not None
    assert spec.origin is not None
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / FRAMEWORK).symlink_to(Path(spec.origin).parent.parent / FRAMEWORK)
    build_wheels(tmp_path)
    return tmp_path


def try_dlopen(site: Path, *arguments: str) -> list[str]:
    path = os.pathsep.join([str(site / "wheels-only"), os.environ["PYTHONPATH"]])
    (site / "wheels-only").mkdir()
    (site / "wheels-only" / "nvidia").symlink_to(site / "nvidia")
    asked = subprocess.run(
        [sys.executable, "-c", TRY_DLOPEN, str(site / FRAMEWORK), *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert asked.returncode == 0, asked.stderr
    return [line.strip() for line in asked.stdout.splitlines()]


@needs_compiler
def test_tensorflow_refuses_the_wheels_as_they_are_installed(site: Path) -> None:
    assert try_dlopen(site) == ["refused"]


@needs_compiler
def test_it_refuses_them_because_it_does_not_look_into_cusolver_s_folder(site: Path) -> None:
    (site / "nvidia/cusolver/lib/libcusolver.so.11").rename(site / "nvidia/cublas/lib/libcusolver.so.11")

    assert try_dlopen(site) == ["opened"]


@needs_compiler
def test_tensorflow_opens_them_once_they_are_loaded(site: Path) -> None:
    assert try_dlopen(site, "preload") == ["missing:", "opened"]


@needs_compiler
def test_without_cusolver_tensorflow_refuses_and_it_is_named(site: Path) -> None:
    (site / "nvidia/cusolver/lib/libcusolver.so.11").unlink()

    assert try_dlopen(site, "preload") == ["missing: libcusolver.so.11", "refused"]


def test_a_library_that_is_nowhere_is_a_fault_with_the_loader_s_words(tmp_path: Path) -> None:
    faults = {fault.library.soname: fault.reason for fault in preload([tmp_path])}

    assert "cannot open shared object file" in faults["libcusolver.so.11"]


def test_a_library_that_is_damaged_is_a_fault(tmp_path: Path) -> None:
    file = tmp_path / "cusolver" / "lib" / "libcusolver.so.11"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"no library")

    faults = {fault.library.soname: fault.reason for fault in preload([tmp_path])}

    assert str(file) in faults["libcusolver.so.11"]
