"""The service's front ends, as parameters of tests that start it."""

from __future__ import annotations

import importlib.util
import sys

import pytest

GRPCIO = "grpcio"
ENVOY = "envoy"


def missing_for_envoy() -> str:
    """Return what keeps the envoy front end from running here, or an empty string."""
    if importlib.util.find_spec("pyvoy") is None:
        return "pyvoy is not installed; there may be no wheel for this machine"
    from pyvoy._server import get_envoy_environ

    if not {"LD_PRELOAD", "DYLD_INSERT_LIBRARIES"} & get_envoy_environ().keys():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return f"this Python has no shared library; on Debian and Ubuntu: apt-get install libpython{version}"
    return ""


_missing = missing_for_envoy()

needs_envoy = pytest.mark.skipif(bool(_missing), reason=_missing)

FRONT_ENDS = (GRPCIO, pytest.param(ENVOY, marks=needs_envoy))

AVAILABLE = (GRPCIO,) if _missing else (GRPCIO, ENVOY)
"""Those that run on this machine, for fixtures that start them all."""
