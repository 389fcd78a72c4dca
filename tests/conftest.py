"""What every room's tests share."""

from __future__ import annotations

import os
import signal

import hypothesis
import pytest

# The suite draws the same cases every time; `make soak` draws new ones.
hypothesis.settings.register_profile("suite", derandomize=True)
hypothesis.settings.load_profile("suite")

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

# A job in the background of a shell starts with SIGINT ignored, and so would every command that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

LOGICAL_CPUS = 4


@pytest.fixture(scope="session", autouse=True)
def logical_cpus() -> tuple[str, ...]:
    """Split this machine's CPU into four devices, which stand for four GPUs, before any test uses TensorFlow."""
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * LOGICAL_CPUS)
    return tuple(f"CPU:{index}" for index in range(LOGICAL_CPUS))
