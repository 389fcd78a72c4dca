"""Shared by the tests of every layer."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import startup.sitecustomize  # noqa: F401 - the processes of pytest import TensorFlow as quickly as those they start
import xdist.scheduler

from testkit.preloading import preloaded, share

# The suite draws the same cases every time; `make soak` draws new ones. A busy machine may take its time over each.
hypothesis.settings.register_profile(
    "suite", derandomize=True, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("suite")

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
if "UNDERSTUDY_TEST_GPUS" not in os.environ:  # set by `make test-gpu`
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

# Services that run for a while would try settings beside the tests.
os.environ.setdefault("UNDERSTUDY_SELF_TUNING", "false")

# The tests call servers on this machine, and so do the programs of others that they start.
os.environ["no_proxy"] = ",".join(filter(None, (os.environ.get("no_proxy"), "localhost,127.0.0.1,::1")))

# A background job of a shell starts with SIGINT ignored, and so would every command that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent

# The Pythons that tests start run `startup/sitecustomize.py` first, and may import `testkit` and `soak`.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (str(TESTS / "startup"), str(TESTS), os.environ.get("PYTHONPATH")))
)

COLLECTED_AFTER = (20_000, 20, 50)
"""When the processes of pytest collect garbage: rarely, as models that are traced leave much that lives on."""

LOGICAL_CPUS = 4
SEED = 1

TAKE_LONGEST = (
    "evaluator/sharding/test_ray_workers.py",
    "docs/test_examples.py",
    "evaluator/model/test_exactness.py",
    "trainer/test_cluster.py",
    "evaluator/model/test_part_scores.py",
    "integration/test_under_load.py",
    "integration/test_connections.py",
    "trainer/test_files.py",
    "trainer/test_training.py",
    "evaluator/test_foreign_formats.py",
    "evaluator/model/test_frozen.py",
    "evaluator/model/test_keras_2.py",
    "trainer/test_compiled.py",
    "evaluator/model/test_scorer.py",
    "evaluator/model/test_architecture.py",
    "evaluator/sharding/test_urls.py",
    "evaluator/test_evaluator_gates.py",
    "trainer/test_parameter_server.py",
    "evaluator/test_evaluator.py",
    "soak/test_samples.py",
    "integration/test_shadows.py",
    "trainer/test_callbacks.py",
    "integration/test_rollouts_behind_envoy.py",
    "integration/test_rollouts.py",
    "integration/test_device_failure.py",
    "integration/test_demo.py",
    "integration/test_command.py",
    "integration/test_callers.py",
    "speed/test_speed.py",
    "protocols/test_tf_serving.py",
    "protocols/test_secure_clients.py",
    "protocols/test_plain_codecs.py",
    "integration/test_calls.py",
    "evaluator/sharding/test_progress.py",
    "evaluator/model/test_replica_forward.py",
    "integration/test_watching.py",
    "integration/test_foreign_checkpoints.py",
    "integration/test_audit.py",
    "integration/test_tls.py",
    "integration/test_prometheus.py",
    "evaluator/test_evaluator_swaps.py",
    "evaluator/model/test_malicious_models.py",
    "evaluator/sharding/test_local_workers.py",
    "evaluator/test_stock_writers.py",
    "evaluator/model/test_slot.py",
    "test_distributions.py",
    "integration/test_evaluate_streams.py",
    "integration/test_large_messages.py",
    "integration/test_hosts.py",
    "trainer/test_full_disk.py",
    "integration/test_cluster_roles.py",
    "trainer/test_formation.py",
    "trainer/test_early_stop.py",
    "trainer/test_cluster_metrics.py",
)
"""Test files that run first, so that all processes end at about the same time.

Files whose tests mostly wait stand between those that compute, so that a processor is never idle for them.

By default ``--dist loadfile`` begins with the files that have most tests; ``make test`` disables that.
"""

SHARED_SERVERS = dict.fromkeys(
    (
        f"protocols/test_{name}.py"
        for name in ("examples", "fuzz", "plain_codecs", "services", "tf_serving", "tf_serving_rest", "triton")
    ),
    "protocols",
)
"""Test files that use the same servers all session long: one process of xdist runs them all, and starts these once."""


class SharingServers(xdist.scheduler.LoadFileScheduling):
    """Gives each process of xdist whole files, and those of `SHARED_SERVERS` together."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return SHARED_SERVERS.get(file.removeprefix("tests/"), file)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Draw the same weights whatever ran before: every run of the suite tries the same numbers."""
    if (keras := sys.modules.get("keras")) is not None:
        keras.utils.set_random_seed(SEED)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute tests by files, as ``make test`` does, but for those that share servers."""
    return SharingServers(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_configure() -> None:
    """Have the processes of xdist share one server of preloaded programs."""
    share()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the slowest files first; the others keep their order."""
    places = {TESTS / name: place for place, name in enumerate(TAKE_LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import all tests without garbage collection, and never collect what they import, as it stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        gc.set_threshold(*COLLECTED_AFTER)


@pytest.fixture
def quick_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run all programs that the test starts in forks of a process that has imported TensorFlow."""
    for name, value in preloaded().items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session", autouse=True)
def logical_cpus() -> tuple[str, ...]:
    """Split this machine's CPU into four devices, which stand for four GPUs, before any test uses TensorFlow."""
    import tensorflow as tf

    from understudy.devices.cuda_libraries import preload

    if "UNDERSTUDY_TEST_GPUS" in os.environ:
        preload()
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * LOGICAL_CPUS)
    return tuple(f"CPU:{index}" for index in range(LOGICAL_CPUS))


@pytest.fixture(scope="session", autouse=True)
def plain_tracebacks() -> None:
    """Log tracebacks as the service does. By default structlog frames and colors them, which is slow."""
    import structlog

    *_, renderer = structlog.get_config()["processors"]
    renderer.exception_formatter = structlog.dev.plain_traceback


@pytest.fixture(autouse=True)
def own_logs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo the configuration of logs that a test makes in this process, as a command does that it runs here."""
    import structlog

    configure = structlog.configure

    def configure_for_now(**options: Any) -> None:
        configure(**{**options, "cache_logger_on_first_use": False})  # else used loggers would keep it

    monkeypatch.setattr(structlog, "configure", configure_for_now)
    root, own = logging.getLogger(), logging.getLogger("understudy")
    handlers, level, own_level = root.handlers[:], root.level, own.level
    yield
    own.setLevel(own_level)
    if structlog.is_configured():
        root.handlers[:] = handlers
        root.setLevel(level)
        structlog.reset_defaults()


@pytest.fixture(autouse=True)
def same_blocked_signals() -> Iterator[None]:
    """Fail a test that leaves signals blocked: the programs that later tests start would never receive them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    after = signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert after == before
