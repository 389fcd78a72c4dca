"""The parts of the demo that need no training."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import grpc
import numpy as np
import pytest

from understudy.cli.demo.cluster import free_ports
from understudy.cli.demo.final_checks import side_by_side
from understudy.cli.demo.progress_printer import ProgressPrinter
from understudy.cli.demo.service import DemoService, EvaluationWatch
from understudy.cli.processes import ChildProcess, ProcessGroup


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def _wait_for_ever() -> list[str]:
    return ["-c", "import signal; print('waiting', flush=True); signal.pause()"]


def test_images_are_drawn_beside_each_other_with_their_captions() -> None:
    images = np.array([[[0.0, 1.0]], [[0.5, 0.0]]], np.float32)
    picture, captions = side_by_side(images, ["1", "2"]).splitlines()
    assert picture == "  ██  ▒▒  "
    assert captions.split() == ["1", "2"]


def test_free_ports_are_all_different() -> None:
    assert len(set(free_ports(20))) == 20


@pytest.mark.parametrize("is_on_path", [True, False])
def test_the_next_steps_name_the_program_as_the_shell_finds_it(
    *, is_on_path: bool, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "bin" / "understudy"
    program.parent.mkdir()
    program.touch(mode=0o755)
    monkeypatch.setattr(sys, "argv", [str(program), "demo"])
    monkeypatch.setenv("PATH", str(program.parent if is_on_path else tmp_path))
    with ProcessGroup() as processes:
        process = processes.add(ChildProcess("it", _wait_for_ever(), log=log))
        service = DemoService(process=process, target="127.0.0.1:1", http_target="127.0.0.1:2")
        service.print_next_steps(ProgressPrinter(), kept=True)
        service.print_next_steps(ProgressPrinter(), kept=False)
    printed = capsys.readouterr().out
    typed = "understudy" if is_on_path else str(program)
    assert f"  {typed} status --target 127.0.0.1:1\n" in printed
    assert f"  {typed} demo --keep " in printed


def test_a_line_that_was_printed_is_found_and_logged(log: Path) -> None:
    process = ChildProcess("it", ["-c", "print('LISTENING on 7')"], log=log)
    assert process.wait_for_line(r"LISTENING on (\d)", timeout_seconds=30)[1] == "7"
    process.wait(timeout_seconds=30)
    assert log.read_text() == "LISTENING on 7\n"


def test_a_process_that_ends_without_the_line_is_reported_with_what_it_said(log: Path) -> None:
    process = ChildProcess("it", ["-c", "print('no luck'); raise SystemExit(3)"], log=log)
    with pytest.raises(click.ClickException, match="it ended before it said 'READY'") as caught:
        process.wait_for_line("READY", timeout_seconds=30)
    assert "no luck" in caught.value.message
    assert str(log) in caught.value.message


def test_a_silent_process_is_reported_after_the_time(log: Path) -> None:
    with ProcessGroup() as processes:
        process = processes.add(ChildProcess("it", _wait_for_ever(), log=log))
        with pytest.raises(click.ClickException, match="was silent"):
            process.wait_for_line("READY", timeout_seconds=0.1)


def test_an_exit_status_other_than_0_is_reported(log: Path) -> None:
    process = ChildProcess("it", ["-c", "raise SystemExit(3)"], log=log)
    with pytest.raises(click.ClickException, match="it ended with exit status 3"):
        process.wait(timeout_seconds=30)


def test_a_group_leaves_no_process_behind_when_something_fails(log: Path) -> None:
    process = ChildProcess("it", _wait_for_ever(), log=log)

    def fail() -> None:
        with ProcessGroup() as processes:
            processes.add(process).wait_for_line("waiting", timeout_seconds=30)
            raise RuntimeError("failed")

    with pytest.raises(RuntimeError, match="failed"):
        fail()
    assert process.ended


def test_a_released_process_lives_on(log: Path) -> None:
    with ProcessGroup() as processes:
        process = processes.add(ChildProcess("it", _wait_for_ever(), log=log))
        process.wait_for_line("waiting", timeout_seconds=30)
        processes.release(process)
    os.kill(process.pid, 0)
    process.stop()
    assert process.ended


@pytest.mark.timeout(30)
def test_the_error_that_ends_the_stream_of_evaluations_ends_the_wait_for_one() -> None:
    with ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        watch = EvaluationWatch(f"127.0.0.1:{port}", ProgressPrinter())
        assert not watch.wait_for(step=1, datasets={"test"}, timeout_seconds=3600), (
            "it ends before the test's own timeout"
        )
        watch.close()
        server.stop(None).wait()
    assert "the server has no such call" in str(watch.error)
