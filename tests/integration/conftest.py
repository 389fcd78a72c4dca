"""Whole servers with real checkpoints on three logical CPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from testkit.checkpoints import Chief, write_dataset
from testkit.front_ends import FRONT_ENDS, GRPCIO
from testkit.in_process import RunningService, running_service
from understudy.clients import Client

REPLICAS = 3
STEPS = (10, 20, 30)

Run = Callable[..., RunningService]


@pytest.fixture(autouse=True)
def laid_out_devices(logical_cpus: tuple[str, ...]) -> None:
    """Configure the devices before a test builds a model, as they cannot be changed later."""
    del logical_cpus


@pytest.fixture(scope="session")
def replicas(logical_cpus: tuple[str, ...]) -> tuple[str, ...]:
    return logical_cpus[:REPLICAS]


@pytest.fixture
def front_end() -> str:
    """The front end of `run_service`; a module that runs with others overrides it."""
    return GRPCIO


@pytest.fixture
def run_service(replicas: tuple[str, ...], tmp_path: Path, front_end: str) -> Iterator[Run]:
    """Return a function that runs a service with given settings until the test ends."""
    with ExitStack() as stack:

        def run(settings: dict[str, Any] | None = None, evaluator: dict[str, Any] | None = None) -> RunningService:
            state_dir = tmp_path / "state"
            chosen = {"run_dir": tmp_path / "run", **(settings or {})}
            if "checkpoints" in chosen:
                del chosen["run_dir"]
            running = running_service(
                chosen, evaluator or {}, replicas=replicas, state_dir=state_dir, front_end=front_end
            )
            return stack.enter_context(running)

        yield run


@pytest.fixture
def chief(tmp_path: Path) -> Chief:
    return Chief(tmp_path / "run")


@pytest.fixture(scope="module")
def dataset_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "test.npz"
    write_dataset(file, best_step=STEPS[-1])
    return file


@pytest.fixture(scope="module", params=FRONT_ENDS)
def service(
    request: pytest.FixtureRequest,
    replicas: tuple[str, ...],
    tmp_path_factory: pytest.TempPathFactory,
    dataset_file: Path,
) -> Iterator[RunningService]:
    """A service with three checkpoints, the newest serving, that accepts messages of at most 1 MiB."""
    run = tmp_path_factory.mktemp("run")
    chief = Chief(run)
    for step in STEPS:
        chief.publish(step)
    settings = {"run_dir": run, "eval_data": {"test": dataset_file}, "max_message_mib": 1}
    with running_service(
        settings, {}, replicas=replicas, state_dir=run / "evaluator", front_end=request.param
    ) as service:
        service.wait_ready()
        client = service.client()
        for evaluation in client.watch_evaluations():
            if evaluation.step == STEPS[-1]:
                break
        yield service


with_grpcio = pytest.mark.parametrize("service", [GRPCIO], indirect=True)
"""For tests with `service` of what lies behind the transport."""


@pytest.fixture
def client(service: RunningService) -> Client:
    return service.client()
