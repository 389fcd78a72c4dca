"""The service's front ends, as parameters of tests that start it."""

from __future__ import annotations

import importlib.util

import pytest

GRPCIO = "grpcio"
ENVOY = "envoy"

FRONT_ENDS = (
    GRPCIO,
    pytest.param(
        ENVOY,
        marks=pytest.mark.skipif(
            importlib.util.find_spec("pyvoy") is None,
            reason="pyvoy is not installed; there may be no wheel for this machine",
        ),
    ),
)
