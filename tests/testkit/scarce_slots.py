"""A service with more checkpoints than slots, and the handles in use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from weakref import WeakSet

from testkit.checkpoints import Chief, write_dataset
from testkit.front_ends import GRPCIO
from testkit.in_process import RunningService, running_service, until
from testkit.living import living
from understudy.clients import Client
from understudy.evaluator.serving.servable import Servable

STEPS = (10, 20, 30, 40, 50)
SERVING = 50
BEST = 40
DATASET_FILE = "test.npz"


class _State:
    """The servables of the service that runs now."""

    def __init__(self) -> None:
        self.servables: WeakSet[Servable] = WeakSet()


_state = _State()


@contextmanager
def service_short_of_slots(run: Path, replicas: tuple[str, ...], front_end: str = GRPCIO) -> Iterator[RunningService]:
    """Run a service with five checkpoints, all scored on ``test``, and three slots; the newest is serving."""
    chief = Chief(run)
    for step in STEPS:
        chief.publish(step)
    write_dataset(run / DATASET_FILE, best_step=BEST)
    settings = {"run_dir": run, "eval_data": {"test": run / DATASET_FILE}}
    with (
        living(Servable) as _state.servables,
        running_service(settings, {}, replicas=replicas, state_dir=run / "evaluator", front_end=front_end) as service,
    ):
        service.wait_ready()
        for evaluation in service.client().watch_evaluations():
            if evaluation.sequence == len(STEPS):
                break
        yield service


def loaded_steps(client: Client) -> list[int]:
    """Return the steps that are loaded, the serving version first."""
    versions = [version for version in client.status().versions if version.state == "AVAILABLE"]
    return [version.step for version in sorted(versions, key=lambda version: not version.serving)]


def absent_steps(client: Client) -> list[int]:
    """Return the steps that are not loaded."""
    return sorted(set(STEPS) - set(loaded_steps(client)))


def until_taken(service: RunningService, client: Client, step: int) -> None:
    """Wait until a stream holds a version that was not loaded before."""
    until(lambda: handles_out() > 0 if service.in_process else step in loaded_steps(client))


def until_given_back(service: RunningService) -> None:
    """Wait until no stream holds a version, if that can be observed."""
    if service.in_process:
        until(lambda: handles_out() == 0)


def handles_out() -> int:
    """Return the unreleased handles of all servables in this process."""
    return sum(servable.handles for servable in _state.servables)
