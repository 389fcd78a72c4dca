"""An evaluation that goes on after the death of its process: the bits of an undisturbed one, and no shard again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import keras
import numpy as np
import pytest
from click.testing import CliRunner

from testkit import sample_models
from testkit.checkpoints import Chief
from testkit.preloading import preloaded
from understudy.checkpoints.layout import RunDir
from understudy.checkpoints.local_checkpoint import open_local_checkpoint
from understudy.cli.main import main
from understudy.evaluator.evaluation import breakdown
from understudy.evaluator.evaluation.breakdown import BreakdownOptions
from understudy.evaluator.evaluation.slices import parse_slices
from understudy.evaluator.evaluator_errors import ConfigurationError
from understudy.evaluator.sharding.evaluate import evaluate_files
from understudy.evaluator.sharding.local_pool import LocalPool
from understudy.evaluator.sharding.pool import Shard
from understudy.evaluator.sharding.progress_file import ProgressFile
from understudy.evaluator.sharding.work import DataSource, ModelSource, Work
from understudy.evaluator.types import EvaluationResult

from .conftest import BATCH_SIZE, EXAMPLES, STEP, Case

PATIENCE_SECONDS = 200.0
DRIVER = Path(__file__).parent / "driver.py"
MIDDLE = 104
"""The examples that are scored when half of them are, in whole batches."""

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("quick_starts")]


class Pools:
    """Makes pools of some processes, and remembers the shards that they computed."""

    def __init__(self, workers: int = 2) -> None:
        self.submitted: list[int] = []
        self._workers = workers

    def __call__(self, work: Work) -> LocalPool:
        submitted = self.submitted

        class RememberingPool(LocalPool):
            def submit(self, worker: int, shard: Shard) -> None:
                submitted.append(shard.index)
                super().submit(worker, shard)

        return RememberingPool(work, workers=self._workers)


def kill_in_the_middle(command: str, case: Case, target: Path, *cluster: str) -> None:
    """Score or predict in a process that dies of SIGKILL once half of the examples are done."""
    (data,) = case.work.data.paths
    arguments = [command, str(case.work.model.folder), str(data), str(target), *cluster]
    command_line, environ = [sys.executable, str(DRIVER), *arguments], {**os.environ, **preloaded()}
    ended = subprocess.run(command_line, env=environ, timeout=PATIENCE_SECONDS, check=False)
    assert ended.returncode in {-signal.SIGKILL, 128 + signal.SIGKILL}


@pytest.fixture(scope="module")
def stored(case: Case, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return what a driver had stored when it was killed."""
    file = tmp_path_factory.mktemp("progress") / "progress"
    kill_in_the_middle("evaluate", case, file)
    return file.read_bytes()


@pytest.fixture
def file(stored: bytes, tmp_path: Path) -> Path:
    """Return a copy of that."""
    copy = tmp_path / "progress"
    copy.write_bytes(stored)
    return copy


def test_an_evaluation_goes_on_where_its_killed_process_ended(case: Case, file: Path) -> None:
    pools, seen = Pools(), list[int]()
    result = evaluate_files(
        case.work,
        step=STEP,
        make_pool=pools,
        batches_per_shard=2,
        progress=lambda scored, _: seen.append(scored),
        progress_file=ProgressFile(file),
    )
    assert result.metrics == case.score
    assert (result.examples, result.batches, result.notes) == (EXAMPLES, 26, ())
    assert seen == [*range(MIDDLE, EXAMPLES, BATCH_SIZE), EXAMPLES]
    assert sorted(pools.submitted) == [*range(MIDDLE // (2 * BATCH_SIZE), 13)]
    assert not file.exists()


def test_the_command_goes_on_from_the_file_and_deletes_it(case: Case, file: Path) -> None:
    (data,) = case.work.data.paths
    options = [str(data), "--run-dir", str(case.run), "--version", "latest", "--progress-file", str(file), "--json"]
    refused = CliRunner().invoke(main, ["evaluate", *options, "--batch-size", "4"])
    assert refused.exit_code == 1
    assert "is of another job (batch_size: 8 there, 4 now)" in refused.stderr
    result = CliRunner().invoke(main, ["evaluate", *options, "--batch-size", str(BATCH_SIZE)])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["metrics"] == dict(case.score)
    assert not file.exists()


def interrupted_and_whole(
    work: Work, folder: Path, pools: Pools | None, examples: int
) -> tuple[EvaluationResult, EvaluationResult]:
    """Score with slices and intervals twice: interrupted in the middle, and at one go."""

    def score(file: ProgressFile | None = None, *, until: int = examples) -> EvaluationResult:
        def progress(scored: int, _: int | None) -> None:
            seen.append(scored)
            if scored > until:
                raise KeyboardInterrupt

        return evaluate_files(
            work,
            step=STEP,
            breakdown=BreakdownOptions(slices=parse_slices(["group"] if pools is None else ["label"]), resamples=5),
            make_pool=pools,
            progress=progress,
            progress_file=file,
        )

    seen: list[int] = []
    whole = score()
    with pytest.raises(KeyboardInterrupt):
        score(ProgressFile(folder / "progress", interval_seconds=0.0, clock=lambda: 0.0), until=examples // 2)
    seen.clear()
    continued = score(ProgressFile(folder / "progress"))
    assert BATCH_SIZE < seen[0] <= examples // 2 + BATCH_SIZE
    return continued, whole


def assert_equal_bits(one: EvaluationResult, other: EvaluationResult) -> None:
    def without_times(result: EvaluationResult) -> EvaluationResult:
        return replace(result, waiting_seconds=0.0, computing_seconds=0.0, resampled={})

    assert without_times(one) == without_times(other)
    assert one.resampled.keys() == other.resampled.keys()
    for name, values in one.resampled.items():
        np.testing.assert_array_equal(values, other.resampled[name])


def test_slices_and_intervals_go_on_with_the_same_bits(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breakdown, "_WAITING_EXAMPLES", 20)
    continued, whole = interrupted_and_whole(case.work, tmp_path, Pools(workers=1), EXAMPLES)
    assert_equal_bits(continued, whole)
    assert len(whole.slices) == 5
    assert whole.intervals


@pytest.mark.parametrize("name", ["regression", "plain_variable", "own_test_step"])
def test_states_of_every_kind_go_on_with_the_same_bits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Maxima, which are no sums; variables that Keras does not know; and a step of the model's own."""
    monkeypatch.setattr(breakdown, "_WAITING_EXAMPLES", 20)
    keras.utils.clear_session(free_memory=False)
    Chief(tmp_path).publish_other(STEP, getattr(sample_models, name)())
    folder = RunDir(tmp_path).checkpoint(STEP)
    x, y, _ = sample_models.unweighted_regression_data(np.random.default_rng(3), 60)
    np.savez(tmp_path / "data.npz", allow_pickle=False, x=x, y=y, group=np.arange(60) % 3)
    work = Work(
        model=ModelSource(folder=folder, digest=open_local_checkpoint(folder).digest),
        data=DataSource(name="data", paths=(tmp_path / "data.npz",)),
        batch_size=BATCH_SIZE,
    )
    continued, whole = interrupted_and_whole(work, tmp_path, None, 60)
    assert_equal_bits(continued, whole)
    assert len(whole.slices) == 3


def test_the_file_is_written_at_intervals_and_more_rarely_if_that_takes_long(tmp_path: Path) -> None:
    now = [0.0]
    file = ProgressFile(tmp_path / "progress", interval_seconds=5.0, clock=lambda: now[0])
    assert file.begin({"step": 1}) is None

    def offered(seconds: float, *, takes: float = 0.0) -> bool:
        now[0] = seconds
        taken: list[int] = []

        def state() -> dict[str, object]:
            taken.append(1)
            now[0] += takes
            return {"state": np.arange(3)}

        file.offer(int(seconds), state, [])
        return bool(taken)

    assert [offered(0.0), offered(4.9), offered(5.0, takes=1.0), offered(25.9), offered(26.0)] == [
        True,
        False,
        True,
        False,
        True,
    ]
    stored = ProgressFile(tmp_path / "progress").begin({"step": 1})
    assert stored is not None
    assert stored.examples == 26
    np.testing.assert_array_equal(stored.state["state"], np.arange(3))


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04"])
def test_another_file_is_refused_and_left_alone(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_bytes(content)
    with pytest.raises(ConfigurationError, match="does not hold the progress of an evaluation"):
        ProgressFile(file).begin({"step": 1})
    assert file.read_bytes() == content


def test_a_damaged_file_is_refused(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(ConfigurationError, match="does not hold the progress of an evaluation"):
        ProgressFile(file).begin({})
