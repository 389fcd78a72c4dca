"""Loads CUDA's libraries from NVIDIA's wheels before TensorFlow looks for them.

TensorFlow 2.21 opens them from ``libtensorflow_framework.so.2``, whose RUNPATH names the folders of most wheels but not
that of cusolver. One library that cannot be opened makes TensorFlow skip every GPU. The dynamic loader finds a library
that is already loaded by its soname, wherever it lies.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class CudaLibrary:
    """A library that TensorFlow 2.21 opens, or that one of those needs.

    Attributes:
        soname: The name under which it is opened.
        folder: Its folder in the wheels' package ``nvidia``.
        package: The distribution that contains it.
        required: Whether TensorFlow skips every GPU without it.
    """

    soname: str
    folder: str
    package: str
    required: bool = True


LIBRARIES = (
    CudaLibrary(soname="libcudart.so.12", folder="cuda_runtime", package="nvidia-cuda-runtime-cu12"),
    CudaLibrary(soname="libnvrtc.so.12", folder="cuda_nvrtc", package="nvidia-cuda-nvrtc-cu12", required=False),
    CudaLibrary(soname="libnvJitLink.so.12", folder="nvjitlink", package="nvidia-nvjitlink-cu12", required=False),
    CudaLibrary(soname="libcublasLt.so.12", folder="cublas", package="nvidia-cublas-cu12"),
    CudaLibrary(soname="libcublas.so.12", folder="cublas", package="nvidia-cublas-cu12"),
    CudaLibrary(soname="libcufft.so.11", folder="cufft", package="nvidia-cufft-cu12"),
    CudaLibrary(soname="libcusparse.so.12", folder="cusparse", package="nvidia-cusparse-cu12"),
    CudaLibrary(soname="libcusolver.so.11", folder="cusolver", package="nvidia-cusolver-cu12"),
    CudaLibrary(soname="libcudnn.so.9", folder="cudnn", package="nvidia-cudnn-cu12"),
    CudaLibrary(soname="libnccl.so.2", folder="nccl", package="nvidia-nccl-cu12", required=False),
)
"""Ordered so that each library comes after its dependencies."""


@dataclass(frozen=True, kw_only=True)
class LibraryFault:
    """A library that could not be loaded.

    Attributes:
        library: The library.
        reason: The dynamic loader's message.
    """

    library: CudaLibrary
    reason: str


def preload(folders: Sequence[Path] | None = None) -> list[LibraryFault]:
    """Load every library for the whole process, from the wheels if they have it, else from the system.

    Loading a library again costs nothing. Call it before TensorFlow first looks for its devices. Thread-safe.

    Args:
        folders: Folders of the package ``nvidia``; those on `sys.path` if None.

    Returns:
        The libraries that could not be loaded.
    """
    folders = wheel_folders() if folders is None else folders
    faults = []
    for library in LIBRARIES:
        try:
            ctypes.CDLL(_place(library, folders), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            faults.append(LibraryFault(library=library, reason=str(error)))
    return faults


def wheel_folders() -> list[Path]:
    """Return the folders of the package ``nvidia``, which NVIDIA's wheels share."""
    try:
        spec = importlib.util.find_spec("nvidia")
    except ValueError:  # a module of that name without a spec
        return []
    return [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]


def _place(library: CudaLibrary, folders: Sequence[Path]) -> str:
    for folder in folders:
        file = folder / library.folder / "lib" / library.soname
        if file.is_file():
            return str(file)
    return library.soname
