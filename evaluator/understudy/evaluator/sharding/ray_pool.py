"""A pool of Ray actors, one on each node of a cluster."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from understudy.checkpoints.temporary_folders import TemporaryFolder, delete_abandoned
from understudy.compat.error_texts import first_line
from understudy.evaluator.evaluator_errors import ConfigurationError
from understudy.evaluator.sharding.cluster_pool import MODE_VARIABLE
from understudy.evaluator.sharding.pool import (
    Event,
    Facts,
    Shard,
    ShardComputed,
    ShardResult,
    WorkerGone,
    WorkerId,
    WorkerReady,
    WorkFailed,
)

if TYPE_CHECKING:  # these import TensorFlow, which a process of Ray needs only when it loads a model
    from understudy.evaluator.sharding.work import Work
    from understudy.evaluator.sharding.worker import ShardWorker

_POLL_SECONDS: Final = 0.05
_NODES_SECONDS: Final = 1.0
_CHECK_SECONDS: Final = 120.0
_CONNECT_SECONDS: Final = 10.0
_ANSWER_SECONDS: Final = 5.0
_DELETION_SECONDS: Final = 20.0
_DELETIONS: Final = 10
_DELETION_PAUSE_SECONDS: Final = 0.2


class RayPool:
    """See `understudy.evaluator.sharding.pool.WorkerPool`. The model's files go to each node once.

    The workers are kept for the next work, see `begin`: a new one takes seconds to import TensorFlow.

    The actors have no retries of Ray's own, and are placed by node. They take no part of Ray's count of CPUs, so that a
    replacement never waits until Ray has noticed that a hung process has ended. Nodes without CPUs get none.

    Args:
        work: What the workers compute, a pickled `understudy.evaluator.sharding.work.Work`, which needs TensorFlow.
        folder: The folder of its checkpoint.
        address: The address of the cluster, ``HOST:PORT``, or ``auto`` for one on this machine.
        workers: The most nodes to use; None for all.

    Raises:
        ConfigurationError: The cluster cannot be reached, or accepts callers without a token.
    """

    def __init__(self, work: bytes, folder: Path, *, address: str, workers: int | None = None) -> None:
        self._address = address
        self._most = workers
        self._ids = itertools.count()
        self._workers: dict[WorkerId, _Actor] = {}
        self._kept: list[_Actor] = []
        self._under_way: dict[Any, tuple[WorkerId, int | None]] = {}
        self._deserted: set[str] = set()
        self._nodes: list[str] = []
        self._nodes_read = -_NODES_SECONDS
        self._woken = threading.Event()
        self._owns_connection = not ray.is_initialized()
        if self._owns_connection:
            _connect(address)
        try:
            _require_token(address)
            self._head = ray.get_runtime_context().gcs_address
            self._set(work, folder)
        except BaseException:
            self.close()
            raise

    def begin(self, work: bytes, folder: Path) -> None:
        """Compute something else from now on. The workers are gone, but those that live are used again for new ones.

        Args:
            work: See `RayPool`.
            folder: See `RayPool`.

        Raises:
            ConfigurationError: The cluster cannot be reached.
        """
        _reach(self._address)
        self._release()
        self._set(work, folder)

    def check_head(self) -> None:
        """Find out whether the head is there. May be called on another thread.

        Raises:
            ConfigurationError: It is not.
        """
        _reach(self._head)

    def _release(self) -> None:
        """Keep the workers that have nothing to do, and end all others."""
        for worker in {worker for worker, shard in self._under_way.values() if shard is not None}:
            self.kill(worker)
        self._kept += self._workers.values()
        self._workers, self._under_way = {}, {}
        asked = {actor.handle.answer.remote(): actor for actor in self._kept if actor.process is not None}
        answered = _answered(asked)
        for ref, actor in asked.items():
            if ref not in answered:
                self._end(actor)
            elif _is_result(ref):
                continue
            self._kept.remove(actor)

    def _set(self, work: bytes, folder: Path) -> None:
        self._work = work
        self._files = ray.put(_files_of(folder))

    @property
    def capacity(self) -> int:
        """See `WorkerPool`."""
        now = time.monotonic()
        if now - self._nodes_read >= _NODES_SECONDS:
            self._nodes_read = now
            self._nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        return len(self._nodes) if self._most is None else min(self._most, len(self._nodes))

    def start_worker(self) -> WorkerId:
        """See `WorkerPool`."""
        worker = next(self._ids)
        taken = Counter(actor.node for actor in self._workers.values())
        node = min(self._nodes, key=lambda each: taken[each])
        actor = next((each for each in self._kept if each.node == node), None)
        if actor is None:
            actor = _Actor(handle=_actor_class().options(scheduling_strategy=_on(node)).remote(), node=node)
        else:
            self._kept.remove(actor)
        self._workers[worker] = actor
        self._under_way[actor.handle.prepare.remote(self._work, [self._files])] = (worker, None)
        return worker

    def submit(self, worker: WorkerId, shard: Shard) -> None:
        """See `WorkerPool`."""
        self._under_way[self._workers[worker].handle.compute.remote(shard)] = (worker, shard.index)

    def kill(self, worker: WorkerId) -> None:
        """See `WorkerPool`."""
        actor = self._workers.pop(worker, None)
        if actor is None:
            return
        self._under_way = {ref: of for ref, of in self._under_way.items() if of[0] != worker}
        self._end(actor)

    def wait(self, timeout_seconds: float) -> Sequence[Event]:
        """See `WorkerPool`."""
        until = time.monotonic() + timeout_seconds
        while time.monotonic() < until and not self._woken.is_set():
            if not self._under_way:
                self._woken.wait(until - time.monotonic())
                continue
            refs = list(self._under_way)
            done, _ = ray.wait(refs, timeout=_POLL_SECONDS)
            if done:
                more, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
                return [self._event(ref) for ref in {*done, *more}]
        self._woken.clear()
        return ()

    def wake(self) -> None:
        """See `WorkerPool`."""
        self._woken.set()

    def close(self) -> None:
        """See `WorkerPool`."""
        self._release()
        while self._kept:
            self._end_actor(self._kept.pop())
        self._delete_left_behind()
        if self._owns_connection:
            ray.shutdown()

    def _end(self, actor: _Actor) -> None:
        """Kill an actor. A process that is stopped does not answer Ray, so it is also killed by its id."""
        self._end_actor(actor)
        if actor.process is not None:
            _kill_process().options(scheduling_strategy=_on(actor.node)).remote(actor.process)

    def _end_actor(self, actor: _Actor) -> None:
        ray.kill(actor.handle, no_restart=True)
        if actor.process is None:  # it was loading its first model, from a temporary folder
            self._deserted.add(actor.node)

    def _delete_left_behind(self) -> None:
        """Have the nodes that are there delete the temporary folders of the workers that were killed on them."""
        nodes = self._deserted & {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        deleting = [_deletion().options(scheduling_strategy=_on(node)).remote() for node in nodes]
        if deleting:
            ray.wait(deleting, num_returns=len(deleting), timeout=_DELETION_SECONDS)

    def _event(self, ref: Any) -> Event:
        worker, shard = self._under_way.pop(ref)
        try:
            answer = ray.get(ref)
        except ray.exceptions.RayError as error:
            self.kill(worker)
            self._nodes_read = -_NODES_SECONDS  # its node may have left
            return WorkerGone(worker=worker, reason=first_line(error))
        if isinstance(answer, Exception):
            return WorkFailed(worker=worker, error=answer)
        if shard is None:
            process, facts = answer
            self._workers[worker] = replace(self._workers[worker], process=process)
            return WorkerReady(worker=worker, facts=facts)
        return ShardComputed(worker=worker, shard=shard, result=answer)


class ClusterWorker:
    """The actor: a `ShardWorker` with a copy of the checkpoint in a folder of its own."""

    def __init__(self) -> None:
        self._worker: ShardWorker | None = None

    def answer(self) -> None:
        """Show that this process runs."""

    def prepare(self, work: bytes, files: Sequence[Any]) -> tuple[int, Facts] | Exception:
        """Load the model and the data; return the id of this process and its facts, or a permanent error.

        Args:
            work: See `RayPool`.
            files: The reference to the files of the checkpoint, in a list, as Ray would wait for it otherwise.
        """
        from understudy.evaluator.sharding.worker import ShardWorker, is_permanent

        with TemporaryFolder() as temporary:
            folder = temporary.path
            for path, content in ray.get(files[0]).items():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(content)
            described: Work = pickle.loads(work)  # noqa: S301 - the driver's, as all that a cluster runs
            here = replace(described, model=replace(described.model, folder=folder))
            worker, self._worker = self._worker, None
            try:
                if worker is None:
                    worker = ShardWorker(here)
                else:
                    worker.change(here)
            except Exception as error:
                if is_permanent(error):
                    return error
                raise
        self._worker = worker
        return os.getpid(), worker.facts

    def compute(self, shard: Shard) -> ShardResult | Exception:
        """Return the batches of a shard, or a permanent error."""
        from understudy.evaluator.sharding.worker import is_permanent

        if self._worker is None:
            raise RuntimeError("prepare was not called")
        try:
            return self._worker.compute(shard)
        except Exception as error:
            if is_permanent(error):
                return error
            raise


@dataclass(frozen=True, kw_only=True)
class _Actor:
    handle: Any
    node: str
    process: int | None = None


def _actor_class() -> Any:
    return ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)(ClusterWorker)


def _answered(asked: Collection[Any]) -> Collection[Any]:
    """Return those of some references that are ready soon."""
    if not asked:
        return ()
    ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_SECONDS)
    return set(ready)


def _is_result(ref: Any) -> bool:
    try:
        ray.get(ref)
    except ray.exceptions.RayError:
        return False
    return True


def _kill_process() -> Any:
    return ray.remote(num_cpus=0, max_retries=0)(_kill)


def _kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def _deletion() -> Any:
    return ray.remote(num_cpus=0, max_retries=0)(_delete_abandoned)


def _delete_abandoned() -> None:
    """Delete what killed processes left, of which some may not have ended yet."""
    for _ in range(_DELETIONS):
        delete_abandoned()
        time.sleep(_DELETION_PAUSE_SECONDS)


def _on(node: str) -> Any:
    return NodeAffinitySchedulingStrategy(node, soft=False)


def _connect(address: str) -> None:
    _reach(address)
    with _refused(address):
        ray.init(address=address, log_to_driver=False)


def _reach(address: str) -> None:
    """Find out whether the head is there: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    with _refused(address):
        if host:
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()


@contextlib.contextmanager
def _refused(address: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise ConfigurationError(f"the cluster {address} cannot be used: {first_line(error)}") from error


def _require_token(address: str) -> None:
    """Refuse a cluster on which everyone who reaches it can run code."""
    mode = ray.get(ray.remote(num_cpus=0, max_retries=0)(_mode).remote(), timeout=_CHECK_SECONDS)
    if mode != "token":
        raise ConfigurationError(
            f"the cluster {address} accepts callers without a token, so everyone who reaches it can run code on it; "
            f"start it with {MODE_VARIABLE}=token"
        )


def _mode() -> str:
    return os.environ.get(MODE_VARIABLE, "")


def _files_of(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
