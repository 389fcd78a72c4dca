"""Evaluation on the nodes of a real Ray cluster of two nodes: the bits of one device, whatever happens to them."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import keras
import numpy as np
import psutil
import pytest

from soak.cluster_faults import KINDS, Fault, Faulty, examples_for, make_work
from testkit import sample_models
from testkit.buckets import BucketServer
from testkit.checkpoints import Chief
from testkit.preloading import preloaded
from testkit.ray_cluster import ENVIRONMENT, RayCluster, running
from testkit.served import serving
from understudy.checkpoints import temporary_folders
from understudy.checkpoints.layout import MODEL_FILE, RunDir
from understudy.checkpoints.local_checkpoint import open_local_checkpoint
from understudy.clients import Client, Evaluation, NotFoundError
from understudy.evaluator.datasets.dataset import load_npz
from understudy.evaluator.evaluator_errors import ClusterError, ConfigurationError
from understudy.evaluator.factory import create_evaluator
from understudy.evaluator.observer import SilentObserver
from understudy.evaluator.settings import CheckpointLocation, EvaluatorSettings
from understudy.evaluator.sharding.cluster_pool import ClusterPool
from understudy.evaluator.sharding.evaluate import evaluate_files
from understudy.evaluator.sharding.local_pool import LocalPool
from understudy.evaluator.sharding.pool import Event, ShardComputed, WorkerReady
from understudy.evaluator.sharding.predict import predict_files
from understudy.evaluator.sharding.progress_file import ProgressFile
from understudy.evaluator.sharding.work import ModelSource, Work, shards_of
from understudy.evaluator.sharding.worker import ShardWorker

from .conftest import BATCH_SIZE, EXAMPLES, STEP, Case
from .test_progress import MIDDLE, kill_in_the_middle

if TYPE_CHECKING:
    from understudy.evaluator.sharding.ray_pool import RayPool

PASS_SIZE = 3
"""The most examples of one call of a model; evaluations have larger batches."""

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
    # Not imported here: Ray reads its environment once, with its first import.
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="this environment is without the extra [ray]"),
]

PATIENCE_SECONDS = 120.0


@pytest.fixture(scope="module")
def cluster(s3: BucketServer) -> Iterator[RayCluster]:
    """Start two nodes, whose workers know the bucket's server by the environment."""
    del s3
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)  # a node gives up if its agents take 30 s to start
        with running(2) as started:
            yield started


def test_the_score_has_the_bits_of_one_device_when_workers_die_hang_or_leave(
    cluster: RayCluster, tmp_path: Path
) -> None:
    faults = [Fault("kill", 9), Fault("join", 0), Fault("stop", 9), Fault("remove", 9)]
    work = make_work(tmp_path, examples=examples_for(len(faults), BATCH_SIZE), batch_size=BATCH_SIZE)
    faulty = Faulty(cluster=cluster, work=work)
    assert faulty.score(faults) == evaluate_files(work, step=STEP).metrics
    assert {kind: faulty.happened[kind] for kind in KINDS} == dict.fromkeys(KINDS, 1)


def test_workers_that_live_compute_the_next_work_and_the_others_are_replaced(
    case: Case, cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from understudy.evaluator.sharding import ray_pool

    model = keras.models.load_model(case.work.model.folder / MODEL_FILE)
    model.set_weights([np.flip(weights) for weights in model.get_weights()])
    Chief(tmp_path / "run").publish_other(STEP, model)
    folder = RunDir(tmp_path / "run").checkpoint(STEP)
    data = replace(case.work.data, digest=load_npz("data", case.file).digest)
    first = replace(case.work, data=data)
    second = replace(first, model=ModelSource(folder=folder, digest=open_local_checkpoint(folder).digest))
    monkeypatch.setattr(ray_pool, "_ANSWER_SECONDS", PATIENCE_SECONDS)
    pool = ray_pool.RayPool(pickle.dumps(first), first.model.folder, address=cluster.address)
    try:
        processes = compute_all(pool, first)
        assert len(processes) == 2
        pool.begin(pickle.dumps(second), folder)
        assert compute_all(pool, second) == processes

        actors = [psutil.Process(process) for process in processes]
        actors[0].kill()
        actors[1].suspend()
        monkeypatch.setattr(ray_pool, "_ANSWER_SECONDS", 0.5)  # neither answers
        pool.begin(pickle.dumps(first), first.model.folder)
        replacements = compute_all(pool, first)
        assert replacements.isdisjoint(processes)
        actors += [psutil.Process(process) for process in replacements]
        pool.begin(pickle.dumps(second), folder)
    finally:
        pool.close()
    until(lambda: not any(process.is_running() for process in actors))


def test_the_temporary_folder_of_a_worker_that_was_killed_is_deleted_at_the_end(
    case: Case, cluster: RayCluster
) -> None:
    from understudy.evaluator.sharding import ray_pool

    found: list[Path] = []

    def has_folder() -> bool:
        for process in worker_processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # one of the test before
                files = [Path(file.path) for file in process.open_files()]
                found.extend(file.parent for file in files if file.name == temporary_folders.LOCK_FILE)
        return bool(found)

    pool = ray_pool.RayPool(pickle.dumps(case.work), case.work.model.folder, address=cluster.address)
    try:
        until(lambda: pool.capacity == 2)
        worker = pool.start_worker()
        until(has_folder)
        pool.kill(worker)
    finally:
        pool.close()
    assert not [folder for folder in found if folder.exists()]


def compute_all(pool: RayPool, work: Work) -> set[int]:
    """Have each new worker of a pool compute a dataset; check the outputs and return the processes of the workers."""
    (shard,) = shards_of(EXAMPLES, BATCH_SIZE, batches=EXAMPLES)
    expected = ShardWorker(work).compute(shard)
    until(lambda: pool.capacity == 2)
    workers = [pool.start_worker() for _ in range(2)]
    await_events(pool, {(WorkerReady, worker) for worker in workers})
    processes = {pool._workers[worker].process or 0 for worker in workers}
    for worker in workers:
        pool.submit(worker, shard)
    for event in await_events(pool, {(ShardComputed, worker) for worker in workers}):
        assert isinstance(event, ShardComputed)
        for batch, other in zip(event.result, expected, strict=True):
            for name, outputs in other.outputs.items():
                np.testing.assert_array_equal(batch.outputs[name], outputs)
    return processes


def await_events(pool: RayPool, expected: set[tuple[type, int]]) -> Sequence[Event]:
    """Wait for one event of each of these kinds and workers."""
    found: list[Event] = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(found) < len(expected):
        assert time.monotonic() < deadline
        found += pool.wait(1.0)
    assert {(type(event), event.worker) for event in found} == expected
    return found


def test_a_connection_that_rests_too_long_ends(case: Case, cluster: RayCluster) -> None:
    pool = ClusterPool(case.work, address=cluster.address)
    try:
        pool.rest(0.0)
        with pytest.raises(ClusterError, match="ended with status 0"):
            until(lambda: bool(pool.wait(0.1)))
    finally:
        pool.close()


def test_an_evaluation_that_loses_its_connection_says_so(case: Case, cluster: RayCluster) -> None:
    pools: list[ClusterPool] = []

    def make_pool(work: Work) -> ClusterPool:
        pools.append(ClusterPool(work, address=cluster.address, workers=1))
        return pools[0]

    def end_connection(*_: object) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pools[0].process_id).kill()

    with pytest.raises(ClusterError, match=r"cannot be used now: process [0-9]+ ended with status -9"):
        evaluate_files(case.work, step=STEP, make_pool=make_pool, batches_per_shard=2, progress=end_connection)


def test_an_evaluation_goes_on_without_the_cluster_where_its_killed_driver_ended(
    case: Case, cluster: RayCluster, tmp_path: Path
) -> None:
    file = tmp_path / "progress"
    kill_in_the_middle("evaluate", case, file, cluster.address)
    seen: list[int] = []
    result = evaluate_files(
        case.work, step=STEP, progress=lambda scored, _: seen.append(scored), progress_file=ProgressFile(file)
    )
    assert result.metrics == case.score
    assert seen == [*range(MIDDLE, EXAMPLES, BATCH_SIZE), EXAMPLES]


def test_predictions_go_on_without_the_cluster_where_their_killed_driver_ended(
    case: Case, cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_in_the_middle("predict", case, tmp_path, cluster.address)
    for name, value in preloaded().items():
        monkeypatch.setenv(name, value)
    written = {file: file.stat().st_mtime_ns for file in tmp_path.glob("outputs-*")}
    assert len(written) == MIDDLE // (2 * BATCH_SIZE) + 1
    work = replace(case.work, data=replace(case.work.data, inputs_only=True))
    predict_files(work, tmp_path, step=STEP, make_pool=lambda work: LocalPool(work, workers=1), batches_per_shard=2)
    assert {file: file.stat().st_mtime_ns for file in written} == written
    found = [np.load(file) for file in sorted(tmp_path.glob("outputs-*"))]
    for name, expected in case.outputs.items():
        np.testing.assert_array_equal(np.concatenate([each[name] for each in found]), expected)


def test_the_nodes_fetch_their_examples_from_a_bucket(
    case: Case, cluster: RayCluster, bucket: str, s3: BucketServer
) -> None:
    work = replace(case.work, data=replace(case.work.data, paths=(f"{bucket}/records",)))
    fetched: list[tuple[str, str]] = []

    def make_pool(work: Work) -> ClusterPool:
        fetched.extend(s3.requests)
        s3.requests.clear()
        return ClusterPool(work, address=cluster.address, workers=1)

    s3.requests.clear()
    result = evaluate_files(work, step=STEP, make_pool=make_pool)
    assert result.metrics == case.score
    assert any(method == "GET" for method, _ in fetched)
    assert any(method == "GET" for method, _ in s3.requests)


def test_a_cluster_is_refused_without_a_token(case: Case, cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE")
    with pytest.raises(ConfigurationError, match="is used only with a token; set RAY_AUTH_MODE=token"):
        ClusterPool(case.work, address=cluster.address)


def test_a_cluster_that_accepts_callers_without_a_token_is_refused() -> None:
    """In a process of its own, which may not call the other cluster."""
    folder = tempfile.mkdtemp(prefix="ray-")
    program = f"""
import os
os.environ.update({dict(ENVIRONMENT)!r}, RAY_AUTH_MODE="disabled")
from testkit.ray_cluster import RayCluster
from understudy.evaluator.evaluator_errors import ConfigurationError
from understudy.evaluator.sharding import ray_pool
cluster = RayCluster({str(folder)!r})
cluster.start()
os.environ["RAY_AUTH_MODE"] = "token"
try:
    ray_pool.RayPool(b"", None, address=cluster.address)
except ConfigurationError as error:
    print(error)
cluster.end()
"""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environ["RAY_TMPDIR"] = folder
    try:
        ended = subprocess.run(
            [sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=240, check=True
        )
    finally:
        shutil.rmtree(folder)
    assert "accepts callers without a token" in ended.stdout


class Served:
    """A served run with a copy of the case's checkpoint, whose evaluations are computed on a cluster."""

    def __init__(self, case: Case, run: Path, server: int, client: Client) -> None:
        self._case = case
        self._server = server
        self._run = run
        self.client = client

    def publish(self, step: int) -> None:
        """Publish the same weights as another step."""
        model = keras.models.load_model(self._case.work.model.folder / MODEL_FILE)
        Chief(self._run).publish_other(step, model)

    def evaluation(self, step: int) -> Evaluation:
        """Wait for the evaluation of a step."""
        until(lambda: bool([*self.client.list_evaluations(min_step=step, max_step=step)]))
        return next(self.client.list_evaluations(min_step=step, max_step=step))

    def has_tables(self) -> bool:
        """Return whether the tables of the serving version are there, which are written after the ledger's entry."""
        with contextlib.suppress(NotFoundError):
            return bool(self.client.evaluation_tables("data").content)
        return False

    def connections(self) -> list[psutil.Process]:
        """Return the processes that hold the server's connection to the cluster."""
        return [*named(psutil.Process(self._server).children(), "cluster_process")]

    def metric(self, name: str) -> float:
        """Return the value of a metric without labels."""
        (line,) = [line for line in self.client.metrics().splitlines() if line.startswith(f"{name} ")]
        return float(line.split()[1])


@pytest.fixture(scope="module")
def served(case: Case, cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    shutil.copytree(case.run, folder / "run")
    (data,) = case.work.data.paths
    with (
        serving(
            folder / "run",
            "model",
            *("--logical-cpus", "1", "--evaluation-batch-size", str(BATCH_SIZE), "--cluster", cluster.address),
            *("--max-batch-size", str(PASS_SIZE)),
            *("--eval-data", f"data={data}", "--slice", "label", "--resamples", "20", "--tables"),
        ) as server,
        Client(server.grpc) as client,
    ):
        yield Served(case, folder / "run", server.pid, client)


def test_a_served_run_is_scored_on_the_cluster_with_the_bits_of_one_device(
    case: Case, served: Served, tmp_path: Path
) -> None:
    on_cluster = served.evaluation(STEP)
    assert served.metric("understudy_cluster_nodes") >= 1
    until(served.has_tables)
    tables = served.client.evaluation_tables("data").content
    settings = EvaluatorSettings(
        state_dir=tmp_path,
        devices=("CPU:0",),
        evaluation_batch_size=BATCH_SIZE,
        max_batch_size=PASS_SIZE,
        slice=("label",),
        resamples=20,
        tables=True,
    )
    location = CheckpointLocation(folder=case.run, is_run=True, eval_data={"data": case.file})
    with create_evaluator(location, settings, SilentObserver()).evaluator as evaluator:
        until(lambda: any(map(evaluator.has_tables, evaluator.ledger.of_step(STEP))))
        here = evaluator.tables("data")
    assert (on_cluster.metrics, on_cluster.resamples) == (here.record.metrics, 20)
    assert {name: (each.low, each.high) for name, each in on_cluster.intervals.items()} == {
        name: (each.low, each.high) for name, each in here.record.intervals.items()
    }
    assert [(each.name, each.examples, each.metrics) for each in on_cluster.slices] == [
        (each.name, each.examples, each.metrics) for each in here.record.slices
    ]
    assert len(on_cluster.slices) == 5
    assert on_cluster.notes == here.record.notes
    assert tables == here.content
    assert tables["hardest"]


def test_the_connection_of_a_served_run_is_kept_for_the_next_checkpoint(served: Served) -> None:
    first = served.evaluation(STEP)
    (connection,) = served.connections()
    served.publish(STEP + 1)
    assert served.evaluation(STEP + 1).metrics == first.metrics
    assert served.connections() == [connection]


def test_a_served_run_is_scored_when_the_connection_is_lost_and_a_worker_is_killed(served: Served) -> None:
    kill_one_of(served.connections)
    served.publish(STEP + 2)
    kill_one_of(worker_processes)
    assert served.evaluation(STEP + 2).metrics == served.evaluation(STEP).metrics


def kill_one_of(find: Callable[[], list[psutil.Process]]) -> None:
    """Wait until there are processes; kill one of them."""

    def is_killed() -> bool:
        for process in find():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
                return True
        return False

    until(is_killed)


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def worker_processes() -> list[psutil.Process]:
    """Return the processes that are actors of a pool."""
    return [*named(psutil.process_iter(), "ray::ClusterWorker")]


def named(processes: Iterable[psutil.Process], text: str) -> Iterator[psutil.Process]:
    """Yield the processes that have a text in their command."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if text in " ".join(process.cmdline()):
                yield process


def test_a_model_with_a_step_of_its_own_is_scored_by_the_server_and_the_ledger_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    Chief(tmp_path / "run").publish_other(1, sample_models.own_test_step())
    x, y, _ = sample_models.unweighted_regression_data(np.random.default_rng(3), 20)
    np.savez(tmp_path / "data.npz", allow_pickle=False, x=x, y=y)
    settings = EvaluatorSettings(state_dir=tmp_path / "state", devices=("CPU:0",), cluster="127.0.0.1:1")
    location = CheckpointLocation(folder=tmp_path / "run", is_run=True, eval_data={"data": tmp_path / "data.npz"})
    with create_evaluator(location, settings, SilentObserver()).evaluator as evaluator:
        until(lambda: evaluator.last_sequence == 1)
        (record,) = evaluator.ledger.of_step(1)
    assert record.notes[-1] == "the cluster was not used: the model has a test_step of its own"
    assert record.metrics


def test_a_server_goes_on_without_the_cluster_and_scores_when_it_is_back(cluster: RayCluster, served: Served) -> None:
    failures = served.metric("understudy_cluster_failures_total")
    assert served.connections()
    cluster.end()
    until(lambda: not served.connections())  # a head hardly starts at the address of one that is still looked for
    served.publish(STEP + 3)
    until(lambda: served.metric("understudy_cluster_failures_total") > failures)
    assert served.metric("understudy_cluster_nodes") == 0
    inputs = {"inputs": np.zeros((1, 6, 6, 1), np.float32)}
    until(lambda: served.client.predict(inputs).step == STEP + 3)
    assert not [*served.client.list_evaluations(min_step=STEP + 3)]
    cluster.start()
    assert served.evaluation(STEP + 3).metrics == served.evaluation(STEP).metrics
