"""A little of what ``make bench`` measures, by the same code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.speed import goals, h2load, real_models, report
from benchmarks.speed.closed_loop import length_of, order
from benchmarks.speed.entrants import FUNCTION, Cell, InProcess, Served
from benchmarks.speed.figures import Figures, Spread, spread_of_ratios
from benchmarks.speed.measuring import Measuring
from benchmarks.speed.models import BATCHES, MODELS, REAL_MODELS, BenchmarkModel
from benchmarks.speed.processes import BenchmarkError, Launch, ProcessTree, Usage
from benchmarks.speed.programs.arrivals import arrivals
from benchmarks.speed.running import Bodies, prepare, running
from benchmarks.speed.servers import floor, own
from benchmarks.speed.workers import Worker
from testkit.preloading import preloaded

pytestmark = pytest.mark.long

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> Bodies:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in preloaded().items():
            patch.setenv(name, value)
        return prepare(tmp_path_factory.mktemp("mlp"), MODELS["mlp"])


OUTPUT = """starting benchmark...

finished in 1.30s, 3076.92 req/s, 187.50KB/s
requests: 4000 total, 4008 started, 4000 done, 4000 succeeded, 0 failed, 0 errored, 0 timeout
status codes: 4000 2xx, 0 3xx, 0 4xx, 0 5xx
traffic: 243.75KB (249600) total, 12.00KB (12288) headers (space savings 96.16%), 273.44KB (280000) data
"""


def log_of(count: int, *, spacing_us: int, took_us: int) -> str:
    return "".join(f"{1_700_000_000_000_000 + number * spacing_us}\t200\t{took_us}\n" for number in range(count))


def test_what_h2load_says_is_read_without_the_warm_up() -> None:
    load = h2load.read(OUTPUT, log_of(1300, spacing_us=1000, took_us=500), seconds=1.0)

    assert load.requests_per_second == 1000
    assert load.latencies_ms.tolist() == [0.5] * 1000
    assert load.reply_bytes == 70


def test_a_load_with_failed_requests_is_no_result() -> None:
    with pytest.raises(BenchmarkError, match="3 of 4000 requests failed"):
        h2load.read(OUTPUT.replace("0 errored", "3 errored"), log_of(10, spacing_us=1, took_us=1), seconds=1.0)


def test_a_load_that_nobody_answered_is_no_result() -> None:
    with pytest.raises(BenchmarkError, match="no request was answered"):
        h2load.read(OUTPUT, "", seconds=1.0)


def test_a_load_whose_requests_were_all_refused_is_no_result() -> None:
    with pytest.raises(BenchmarkError, match="all requests were refused"):
        h2load.read(OUTPUT.replace("(280000) data", "(0) data"), log_of(10, spacing_us=1, took_us=1), seconds=1.0)


def test_arrivals_are_a_poisson_process_and_the_same_ones_for_the_same_seed() -> None:
    moments = arrivals(1000, 20, seed=1)

    assert moments == arrivals(1000, 20, seed=1) != arrivals(1000, 20, seed=2)
    assert len(moments) == pytest.approx(20_000, rel=0.05)
    gaps = np.diff(moments)
    assert gaps.min() >= 0
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)


def test_a_spread_tells_the_median_and_the_ratios_within_a_round() -> None:
    assert spread_of_ratios([2.0, 4.0, 9.0], [1.0, 4.0, 3.0]) == Spread(median=4 / 3, low=1.0, high=3.0)


class Nobody:
    """Takes part in the cells of one batch size."""

    def __init__(self, name: str, rows: int) -> None:
        self.name = name
        self._rows = rows

    @property
    def tree(self) -> ProcessTree:
        raise NotImplementedError

    def takes(self, cell: Cell) -> bool:
        return cell.rows <= self._rows

    def measure(self, cell: Cell, seconds: float) -> Figures:
        raise NotImplementedError


def test_every_round_measures_everybody_in_every_cell_and_begins_with_another() -> None:
    cells = [Cell(model="mlp", rows=rows, connections=1) for rows in BATCHES]
    taking_part = [Nobody("a", 256), Nobody("b", 256), Nobody("c", 1)]

    rounds = [[(cell, one.name) for cell, one in order(cells, taking_part, turn)] for turn in range(3)]

    assert len({frozenset(measured) for measured in rounds}) == 1
    assert len(rounds[0]) == 7
    assert len({tuple(measured) for measured in rounds}) == 3


def test_a_cell_is_measured_for_longer_where_answers_take_longer() -> None:
    lengths = [length_of(Cell(model="mlp", rows=rows, connections=64)) for rows in BATCHES]

    assert lengths == [1, 1, 3]


def test_a_tree_of_processes_ends_with_its_context(tmp_path: Path) -> None:
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    with ProcessTree(
        "family", Launch(command=(sys.executable, "-c", script)), log=tmp_path / "log", stdin=True
    ) as tree:
        assert tree.popen.stdout is not None
        assert tree.popen.stdout.readline() == "1\n"
        tree.pause()
        assert tree.usage().rss_mib > 0
    assert tree.popen.returncode is not None


def test_a_worker_that_cannot_start_says_what_it_printed(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="No module named"):
        Worker("nothing", log=tmp_path / "log")


@pytest.mark.skipif(h2load.find() is None, reason="there is no h2load; tools/fetch_h2load.sh fetches it")
def test_the_service_and_an_echo_are_measured_side_by_side(mlp: Bodies, tmp_path: Path) -> None:
    servers = [own()[0], floor()[0]]
    cell = Cell(model="mlp", rows=32, connections=2)

    with running(servers, mlp, tmp_path) as started:
        figures = [Served(running=one, bodies=mlp).measure(cell, 0.5) for one in started]

    assert started[0].reply_bytes[32] > 32 * 10 * 4
    for one in figures:
        assert one.requests_per_second > 0
        assert 0 < one.p50_ms <= one.p99_ms
        assert one.cpu_seconds_per_1000 > 0
        assert one.rss_mib > 10


@pytest.mark.usefixtures("quick_starts")
def test_the_model_in_process_is_measured_when_asked(mlp: Bodies, tmp_path: Path) -> None:
    arguments = ("function", "mlp", str(mlp.file), str(tmp_path / "place"))
    with Worker("in_process", *arguments, log=tmp_path / "log") as worker:
        entrant = InProcess(name=FUNCTION, tree=worker, connections=1)
        figures = entrant.measure(Cell(model="mlp", rows=1, connections=1), 0.2)

    assert figures.requests_per_second > 0
    assert 0 < figures.p50_ms <= figures.p99_ms


def example_results() -> dict[str, dict[str, Any]]:
    """Return results of two entrants in two rounds, fit to be rendered."""
    machine = {
        "began": "2026-01-01 00:00 UTC",
        "command": "python -m benchmarks.speed",
        "commit": "abc",
        "processor": "a processor",
        "cores": 2,
        "memory_gib": 4,
        "load_before": [0.1, 0.2, 0.3],
        "versions": {"python": "3.11"},
    }
    rates = {"understudy envoy": [130.0, 140.0], "triton 1 instance": [100.0, 100.0]}
    rows = [
        {
            "model": "mlp",
            "rows": 1,
            "connections": 64,
            "entrant": name,
            "requests_per_second": values,
            **{column: [1.0, 2.0] for column in ("p50_ms", "p99_ms", "cpu_seconds_per_1000", "rss_mib")},
        }
        for name, values in rates.items()
    ]
    options = {"rounds": 2, "seconds": 1.0, "only": []}
    head = {"topic": "closed_loop", "machine": machine, "options": options, "took_seconds": 9}
    rest = {"models": {"mlp": "an MLP"}, "cpu_share_at_rest": {"triton 1 instance": 0.01}, "failures": ["x: refused"]}
    rest["found_settings"] = {"mlp": {"max_batch_size": 64, "because": "8: 40"}}
    return {"peers_closed_loop": {**head, **rest, "rows": rows}}


def test_results_are_rendered_as_tables_a_plot_and_goals(tmp_path: Path) -> None:
    for name, result in example_results().items():
        report.save(tmp_path, name, result)
    assert report.load(tmp_path) == example_results()

    report.write(tmp_path)

    text = (tmp_path / "README.md").read_text()
    assert "| understudy envoy | 64 | 135 (130 to 140) |" in text
    assert "not measured: x: refused" in text
    assert "- mlp: max_batch_size 64, because 8: 40\n" in text
    assert (tmp_path / "peers_closed_loop.webp").read_bytes()[8:12] == b"WEBP"
    (line,) = [
        line
        for line in (tmp_path / "goals.md").read_text().splitlines()
        if "batch 1, 64 conn" in line and "envoy ÷" in line and "Predict" in line
    ]
    assert "| ≥ 1.3 | 1.35 (1.30 to 1.40) | yes | `make bench-peers TOPIC=closed_loop` |" in line


def test_a_goal_of_what_was_not_measured_says_so() -> None:
    assert goals.render({}).count("not measured") == len(goals.GOALS)


def test_the_command_line_tells_what_it_can_measure_and_ends_what_it_started_on_sigterm(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "benchmarks.speed")
    told = subprocess.run((*command, "--help"), cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert "overload" in told.stdout
    with subprocess.Popen(
        (*command, "overload", "--quick", "--results", str(tmp_path)),
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("== overload")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    assert not list(tmp_path.glob("*.json"))


def test_a_cell_without_an_answer_has_no_rate_and_waits_of_its_whole_time() -> None:
    figures = Figures.of([], seconds=0.6, answered=0, used=Usage(cpu_seconds=1.0, rss_mib=100.0))
    assert (figures.requests_per_second, figures.p50_ms, figures.p99_ms) == (0.0, 600.0, 600.0)


def test_a_model_that_cannot_be_measured_is_a_failure_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []

    def measure(model: BenchmarkModel, *_: object) -> dict[str, Any]:
        if not measured:
            measured.append("")
            raise BenchmarkError("triton ended with 1")
        measured.append(model.name)
        return {"max_batch_size": 64}

    monkeypatch.setattr(real_models, "_measure", measure)
    result = real_models.run(Measuring(rounds=1, seconds=0.1, only=(), with_peers=True, work=tmp_path))

    first, *others = REAL_MODELS
    assert measured[1:] == others == list(result["found_settings"])
    assert result["failures"] == [f"{REAL_MODELS[first].text}: triton ended with 1"]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], {}),
        (['{"event":"serving","step":1}', '{"event":"settings for this model and machine","max_ba'], {}),
        (
            ["Envoy began", '{"event":"settings for this model and machine","level":"info","because":"8: 40"}'],
            {"because": "8: 40"},
        ),
        (['{"event":"cannot find settings for the model","reason":"too busy"}'], {"reason": "too busy"}),
    ],
)
def test_what_a_server_found_is_read_from_its_log(tmp_path: Path, lines: list[str], expected: dict[str, str]) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join(lines) + "\n")
    assert real_models.read_settings(log) == expected
