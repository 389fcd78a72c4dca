"""Evaluation on the nodes of a real Ray cluster of two nodes: the bits of one device, whatever happens to them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from understudy.evaluator.evaluator_errors import ConfigurationError
from understudy.evaluator.sharding.evaluate import evaluate_files
from understudy.evaluator.sharding.progress_file import ProgressFile
from understudy.evaluator.sharding.work import Work

from .conftest import BATCH_SIZE, EXAMPLES, STEP, Case
from .test_progress import MIDDLE, kill_in_the_middle

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
    # Not imported here: Ray reads its environment once, with its first import.
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="this environment is without the extra [ray]"),
]

END_SECONDS = 30.0
NODE = {
    "num_cpus": 1,
    "object_store_memory": 100 * 2**20,
    "include_dashboard": False,
    "node_ip_address": "127.0.0.1",
}
ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "ab" * 32,
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # only loopback
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Start two nodes of one CPU each. None of their processes and files is left afterwards."""
    before = set(psutil.Process().children(recursive=True))
    folder = tempfile.mkdtemp(prefix="ray-")  # the paths of sockets below it are short
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)  # a node gives up if its agents take 30 s to start
        from ray.cluster_utils import Cluster

        built = Cluster(initialize_head=True, head_node_args={**NODE, "temp_dir": folder})
        try:
            built.add_node(**NODE)
            yield built
        finally:
            started = set(psutil.Process().children(recursive=True)) - before
            built.shutdown()
            _, left = psutil.wait_procs(started, END_SECONDS)
            for process in left:
                process.kill()
            shutil.rmtree(folder, ignore_errors=True)
            assert not left


class Pools:
    """Makes pools on a cluster, and remembers the last one."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.pool: Any = None

    def __call__(self, work: Work) -> Any:
        from understudy.evaluator.sharding.ray_pool import RayPool

        self.pool = RayPool(work, address=self._address)
        return self.pool

    def signal_one(self, number: signal.Signals) -> None:
        """Send a signal to a worker that is ready."""
        os.kill(next(actor.process for actor in self.pool._workers.values() if actor.process), number)


def score_of(case: Case, pools: Pools, act: Callable[[], object]) -> object:
    """Score on the cluster, and do something once the first batch is scored."""
    seen: list[int] = []

    def progress(scored: int, _: int | None) -> None:
        seen.append(scored)
        if len(seen) == 1:
            act()

    result = evaluate_files(case.work, step=STEP, make_pool=pools, batches_per_shard=2, progress=progress)
    assert (result.examples, result.notes) == (EXAMPLES, ())
    return result.metrics


def test_the_score_has_the_bits_of_one_device_when_workers_die_hang_or_leave(case: Case, cluster: Any) -> None:
    pools = Pools(cluster.address)
    assert score_of(case, pools, lambda: None) == case.score
    assert score_of(case, pools, lambda: pools.signal_one(signal.SIGKILL)) == case.score
    assert score_of(case, pools, lambda: pools.signal_one(signal.SIGSTOP)) == case.score
    node = next(iter(cluster.worker_nodes))
    assert score_of(case, pools, lambda: cluster.remove_node(node, allow_graceful=False)) == case.score


def test_an_evaluation_goes_on_where_its_killed_driver_ended(case: Case, cluster: Any, tmp_path: Path) -> None:
    file = tmp_path / "progress"
    kill_in_the_middle(case, file, cluster.address)
    seen: list[int] = []
    result = evaluate_files(
        case.work,
        step=STEP,
        make_pool=Pools(cluster.address),
        batches_per_shard=2,
        progress=lambda scored, _: seen.append(scored),
        progress_file=ProgressFile(file),
    )
    assert result.metrics == case.score
    assert seen == [*range(MIDDLE, EXAMPLES, BATCH_SIZE), EXAMPLES]


def test_a_cluster_is_refused_without_a_token(case: Case, cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE")
    with pytest.raises(ConfigurationError, match="is used only with a token; set RAY_AUTH_MODE=token"):
        Pools(cluster.address)(case.work)


def test_a_cluster_that_accepts_callers_without_a_token_is_refused() -> None:
    """In a process of its own, which may not call the other cluster."""
    program = f"""
import os
os.environ.update({ENVIRONMENT!r}, RAY_AUTH_MODE="disabled")
from ray.cluster_utils import Cluster
from understudy.evaluator.evaluator_errors import ConfigurationError
from understudy.evaluator.sharding import ray_pool
cluster = Cluster(initialize_head=True, head_node_args={NODE!r})
os.environ["RAY_AUTH_MODE"] = "token"
try:
    ray_pool.RayPool(None, address=cluster.address)
except ConfigurationError as error:
    print(error)
cluster.shutdown()
"""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=240, check=True
    )
    assert "accepts callers without a token" in ended.stdout
