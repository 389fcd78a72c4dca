"""Evaluation and prediction on processes of this machine: the bits of one device, whatever happens to them."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import keras
import numpy as np
import psutil
import pytest

from testkit import sample_models
from testkit.checkpoints import Chief
from testkit.preloading import fork_of
from understudy.checkpoints import DirectoryLock
from understudy.checkpoints.layout import MODEL_FILE, RunDir
from understudy.checkpoints.local_checkpoint import open_local_checkpoint
from understudy.evaluator.datasets.dataset import datasets_of
from understudy.evaluator.evaluation.breakdown import BreakdownOptions
from understudy.evaluator.evaluation.slices import parse_slices
from understudy.evaluator.evaluator_errors import ConfigurationError, InvalidInputError
from understudy.evaluator.model.devices import DeviceSettings, build_strategy
from understudy.evaluator.model.slot import Slot
from understudy.evaluator.sharding.coordinator import ShardCoordinator
from understudy.evaluator.sharding.evaluate import evaluate_files
from understudy.evaluator.sharding.local_pool import LocalPool
from understudy.evaluator.sharding.pool import Event, ShardComputed
from understudy.evaluator.sharding.predict import predict_files
from understudy.evaluator.sharding.schedule import ShardingError, WorkerTimeouts
from understudy.evaluator.sharding.work import DataSource, ModelSource, Work, open_data, shards_of
from understudy.evaluator.sharding.worker import ShardWorker
from understudy.experiments import load_experiment

from .conftest import EXAMPLES, STEP, Case

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("quick_starts")]


class Pools:
    """Makes pools of two processes, and remembers the last one and how many workers it started."""

    def __init__(self) -> None:
        self.pool: LocalPool | None = None
        self.started = 0

    def __call__(self, work: Work) -> LocalPool:
        owner = self

        class CountingPool(LocalPool):
            def start_worker(self) -> int:
                owner.started += 1
                return super().start_worker()

        self.pool = CountingPool(work, workers=2)
        return self.pool

    def stop_first(self) -> None:
        assert self.pool is not None
        os.kill(fork_of(self.pool.process_ids[0]), signal.SIGSTOP)

    def kill_all(self) -> None:
        assert self.pool is not None
        for process_id in self.pool.process_ids:
            os.kill(process_id, signal.SIGKILL)


@pytest.fixture
def pools() -> Pools:
    return Pools()


def score_of(
    case: Case, pools: Pools, fault: Callable[[], None] | None = None, timeouts: WorkerTimeouts | None = None
) -> object:
    """Score on workers, which something happens to once the first batch is scored."""
    seen: list[int] = []

    def progress(scored: int, total: int | None) -> None:
        assert total == EXAMPLES
        seen.append(scored)
        if len(seen) == 1 and fault is not None:
            fault()

    result = evaluate_files(
        case.work, step=STEP, make_pool=pools, batches_per_shard=2, progress=progress, timeouts=timeouts
    )
    assert seen == [*range(8, EXAMPLES, 8), EXAMPLES]
    assert (result.step, result.examples, result.batches, result.notes) == (STEP, EXAMPLES, 26, ())
    return result.metrics


def test_the_score_of_two_processes_has_the_bits_of_one_device(case: Case, pools: Pools) -> None:
    assert score_of(case, pools) == case.score
    assert case.score == pytest.approx(case.keras_score, rel=1e-6)
    assert pools.started == 2


def test_killed_workers_are_replaced_and_the_score_has_the_same_bits(case: Case, pools: Pools) -> None:
    assert score_of(case, pools, pools.kill_all) == case.score
    assert pools.started > 2


def test_a_stopped_worker_is_overtaken_and_the_score_has_the_same_bits(case: Case, pools: Pools) -> None:
    timeouts = WorkerTimeouts(least=0.2)
    assert score_of(case, pools, pools.stop_first, timeouts) == case.score


def test_slices_and_intervals_are_those_of_one_process(case: Case, pools: Pools) -> None:
    options = BreakdownOptions(slices=parse_slices(["label", "predicted"]), resamples=20)
    expected = evaluate_files(case.work, step=STEP, breakdown=options)
    found = evaluate_files(case.work, step=STEP, breakdown=options, make_pool=pools)
    assert [(part.name, part.examples) for part in found.slices] == [(p.name, p.examples) for p in expected.slices]
    assert {part.name.partition("=")[0] for part in found.slices} == {"label", "predicted"}
    for name, interval in expected.intervals.items():
        assert (found.intervals[name].low, found.intervals[name].high) == pytest.approx((interval.low, interval.high))
    for part, other in zip(found.slices, expected.slices, strict=True):
        assert part.metrics == pytest.approx(other.metrics)


def test_data_that_do_not_fit_the_model_end_the_work_at_once(case: Case, pools: Pools, tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x=np.zeros((40, 5, 5, 1), "f4"), y=np.zeros(40, "i8"))
    work = replace(case.work, data=DataSource(name="data", paths=(tmp_path / "data.npz",)))
    with pytest.raises(InvalidInputError, match=r"input 'inputs' has shape \[8, 5, 5, 1\]"):
        evaluate_files(work, step=STEP, make_pool=pools)
    assert pools.started == 1


def test_a_worker_that_returns_too_few_examples_ends_the_work(case: Case) -> None:
    class LosingPool(LocalPool):
        def wait(self, timeout_seconds: float) -> Sequence[Event]:
            return [
                replace(event, result=event.result[1:]) if isinstance(event, ShardComputed) else event
                for event in super().wait(timeout_seconds)
            ]

    with pytest.raises(ShardingError, match="a worker returned 8 of the 16 examples from example 0 on"):
        evaluate_files(case.work, step=STEP, make_pool=lambda work: LosingPool(work, workers=1), batches_per_shard=2)


def test_a_model_with_a_step_of_its_own_is_scored_without_workers_and_says_so(pools: Pools, tmp_path: Path) -> None:
    Chief(tmp_path).publish_other(1, sample_models.own_test_step())
    folder = RunDir(tmp_path).checkpoint(1)
    x, y, _ = sample_models.unweighted_regression_data(np.random.default_rng(3), 20)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    work = Work(
        model=ModelSource(folder=folder, digest=open_local_checkpoint(folder).digest),
        data=DataSource(name="data", paths=(tmp_path / "data.npz",)),
        batch_size=8,
    )
    result = evaluate_files(work, step=1, make_pool=pools)
    assert result.notes[-1] == "no workers were used: the model has a test_step of its own"
    assert pools.pool is None


def test_predictions_are_those_of_one_device_and_nothing_is_computed_twice(
    case: Case, pools: Pools, tmp_path: Path
) -> None:
    work = replace(case.work, data=replace(case.work.data, inputs_only=True))
    folder = tmp_path / "out"

    def predict(work: Work = work) -> list[int]:
        done: list[int] = []
        predict_files(
            work,
            folder,
            step=STEP,
            make_pool=pools,
            batches_per_shard=4,
            progress=lambda examples, _: done.append(examples),
        )
        return done

    assert predict() == [0, 32, 64, 96, 128, 160, 192, 203]
    names = [f"outputs-{index:08d}.npz" for index in range(7)]
    assert sorted(path.name for path in folder.iterdir()) == ["job.json", "lock", "manifest.json", *names]
    manifest = (folder / "manifest.json").read_bytes()
    found = [dict(np.load(folder / name)) for name in names]
    for name, expected in case.outputs.items():
        np.testing.assert_array_equal(np.concatenate([each[name] for each in found]), expected)

    for name in ("manifest.json", names[2], names[5]):
        (folder / name).unlink()
    left = {path: path.stat().st_mtime_ns for path in folder.glob("outputs-*")}
    assert predict() == [139, 171, 203]
    assert all(path.stat().st_mtime_ns == before for path, before in left.items())
    assert (folder / "manifest.json").read_bytes() == manifest

    started = pools.started
    assert predict() == [203]
    assert pools.started == started
    with pytest.raises(ConfigurationError, match="of another job \\(batch_size: 8 there, 4 now\\)"):
        predict(replace(work, batch_size=4))


def test_a_folder_with_other_files_is_refused(case: Case, pools: Pools, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigurationError, match="holds other files"):
        predict_files(case.work, tmp_path, step=STEP, make_pool=pools)


class _ComputedError(Exception):
    """Raised where workers would be started."""


def _no_workers(_: Work) -> LocalPool:
    raise _ComputedError


def test_a_folder_that_another_process_writes_to_is_refused(case: Case, tmp_path: Path) -> None:
    with (
        DirectoryLock(tmp_path / "out"),
        pytest.raises(ConfigurationError, match=f"is in use by process {os.getpid()} on .*; stop that process or wait"),
    ):
        predict_files(case.work, tmp_path / "out", step=STEP, make_pool=_no_workers)
    with pytest.raises(_ComputedError):
        predict_files(case.work, tmp_path / "out", step=STEP, make_pool=_no_workers)


def test_a_folder_on_nfs_can_be_locked(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS makes locks of byte ranges of them, and these want a file that is open for writing."""
    flock = fcntl.flock

    def as_nfs(descriptor: int, operation: int) -> None:
        if operation & fcntl.LOCK_EX and not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", as_nfs)
    with pytest.raises(_ComputedError):
        predict_files(case.work, tmp_path / "out", step=STEP, make_pool=_no_workers)


def test_a_worker_that_reads_other_examples_is_refused(case: Case) -> None:
    with pytest.raises(ConfigurationError, match="this worker reads other examples"):
        open_data(replace(case.work.data, digest="another"))


def test_a_worker_reads_the_datasets_of_an_experiment() -> None:
    for expected in datasets_of(load_experiment("digits")):
        found = open_data(DataSource(name=expected.name, experiment="digits", digest=expected.digest))
        assert found.examples == expected.examples
    with pytest.raises(ConfigurationError, match="the experiment digits of this worker has no dataset 'other'"):
        open_data(DataSource(name="other", experiment="digits"))


def test_leaving_early_ends_the_processes(case: Case) -> None:
    pool = LocalPool(case.work, workers=2)
    with ShardCoordinator(shards_of(EXAMPLES, 8, batches=2), pool) as coordinator:
        next(coordinator.results())
        processes = pool.process_ids
        assert len(processes) == 2
    assert not pool.process_ids
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_what_killed_workers_leave_in_temporary_folders_is_deleted_at_the_end(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    pool = LocalPool(case.work, workers=2)
    with ShardCoordinator(shards_of(EXAMPLES, 8, batches=2), pool) as coordinator:
        next(coordinator.results())
        for process in pool.process_ids:
            place = psutil.Process(process).environ()["TMPDIR"]
            (Path(tempfile.mkdtemp(dir=place)) / "data.npz").write_bytes(b"as of a file that is being fetched")
    assert not list(tmp_path.iterdir())


def test_a_large_batch_runs_in_the_pieces_of_the_server(tmp_path: Path) -> None:
    inputs = keras.Input((3,), name="x")
    centred = inputs - keras.ops.mean(inputs, axis=0, keepdims=True)  # tells how many examples one call has
    model = keras.Model(inputs, keras.layers.Identity(name="y")(centred))
    model.compile(loss="mse")
    Chief(tmp_path / "run").publish_other(STEP, model)
    published = RunDir(tmp_path / "run").checkpoint(STEP)
    x = np.random.default_rng(3).normal(size=(40, 3)).astype(np.float32)
    np.savez(tmp_path / "data.npz", allow_pickle=False, x=x, y=x)
    work = Work(
        model=ModelSource(folder=published, digest=open_local_checkpoint(published).digest),
        data=DataSource(name="data", paths=(tmp_path / "data.npz",)),
        batch_size=40,
        examples_per_pass=3,
    )
    server = Slot(build_strategy(DeviceSettings()), published / MODEL_FILE, max_batch_size=3)
    in_pieces, _ = server.compute({"x": x})
    (shard,) = shards_of(40, 40)
    (on_node,) = ShardWorker(work).compute(shard)
    np.testing.assert_array_equal(on_node.outputs["y"], in_pieces["y"])
    (whole,) = ShardWorker(replace(work, examples_per_pass=None)).compute(shard)
    assert not np.allclose(whole.outputs["y"], in_pieces["y"])
