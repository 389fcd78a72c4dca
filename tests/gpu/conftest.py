"""Devices of these tests: the machine's GPUs under ``make test-gpu``, else logical CPUs in their place."""

from __future__ import annotations

import pytest

from testkit.hardware import ON_GPUS
from understudy.devices import layout
from understudy.devices.errors import DeviceLayoutError

_TWO = 2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU-only tests if there is no GPU."""
    if ON_GPUS:
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs GPUs: make test-gpu"))


@pytest.fixture(scope="session")
def devices(logical_cpus: tuple[str, ...]) -> tuple[str, ...]:
    """Every GPU, or two logical CPUs."""
    if not ON_GPUS:
        return logical_cpus[:_TWO]
    try:
        planned = layout.plan(["GPU"])
    except DeviceLayoutError as error:
        pytest.exit(str(error), returncode=1)
    layout.apply(planned)
    for facts in layout.describe(planned):
        print(facts)  # noqa: T201 - for the table of docs/how-to/gpus.md
    return planned.selection.names


@pytest.fixture
def several(devices: tuple[str, ...]) -> tuple[str, ...]:
    """Every device; skips the test if there is only one."""
    if len(devices) < _TWO:
        pytest.skip("needs two GPUs, and there is one")
    return devices
