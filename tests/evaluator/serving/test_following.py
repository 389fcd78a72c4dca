"""Downloads of a server that follows, over a link that breaks as told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from testkit.polling import polled
from testkit.small_disk import DISK_BYTES, fill, mounted
from understudy.checkpoints.layout import MAX_STEP, MODEL_FILE, RunDir
from understudy.checkpoints.manifest import Manifest
from understudy.checkpoints.publish import CheckpointPublisher
from understudy.evaluator.evaluator_errors import AnotherEvaluatorError
from understudy.evaluator.serving import following
from understudy.evaluator.serving.decision_file import ServingDecision, ServingReport, Shadow
from understudy.evaluator.serving.following import NetworkFollowing

SECONDS = 20.0
PIECE = 100
CONTENT = bytes(range(250)) * 4


class Link:
    """A link to a run folder. It breaks after some pieces, and may send other bytes."""

    problem = ""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self.pieces = 10**6
        self.falsified = False
        self.offsets: list[int] = []
        self.told: list[ServingReport] = []
        self.decide: Callable[[ServingDecision], None] = lambda _: None

    def start(self, on_decision: Callable[[ServingDecision], None]) -> None:
        self.decide = on_decision

    def report(self, report: ServingReport) -> None:
        self.told.append(report)

    def read(self, decision: ServingDecision, path: str, *, offset: int = 0) -> Iterator[bytes]:
        content = (self._run.checkpoint(decision.step) / path).read_bytes()
        if path == MODEL_FILE:
            self.offsets.append(offset)
            content = bytes(len(content)) if self.falsified else content
        for begin in range(offset, len(content), PIECE):
            if path == MODEL_FILE:
                self.pieces -= 1
                if self.pieces < 0:
                    self.pieces = 10**6
                    raise ConnectionError("the connection broke")
            yield content[begin : begin + PIECE]

    def close(self) -> None:
        pass


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


def publish(run: RunDir, step: int, content: bytes = CONTENT) -> ServingDecision:
    publisher = CheckpointPublisher(run, keep=100)

    def write(folder: Path) -> None:
        (folder / MODEL_FILE).write_bytes(content + bytes([step]))

    manifest: Manifest = publisher.publish(step, write, epoch=None, final=False, metrics={}, signature=None)
    return ServingDecision(step=step, digest=manifest.digest, sequence=step, evaluator_id="e")


@contextmanager
def followed(
    link: Link,
    state: Path,
    *,
    run: RunDir | None = None,
    wake: Callable[[], None] = lambda: None,
    max_download_mib: int = 1,
) -> Iterator[NetworkFollowing]:
    state.mkdir(exist_ok=True)
    found = NetworkFollowing(link, state_dir=state, run=run, accepted=None, max_download_mib=max_download_mib)
    found.start(on_decision=wake, on_downloaded=lambda _: None)
    try:
        yield found
    finally:
        found.close()


def until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < ends
        threading.Event().wait(0.01)


def steps(source: NetworkFollowing) -> list[int]:
    return [checkpoint.step for checkpoint in polled(source)]


def test_a_download_that_breaks_goes_on_where_it_was(run: RunDir, tmp_path: Path) -> None:
    link = Link(run)
    link.pieces = 4
    decision = publish(run, 10)
    with followed(link, tmp_path / "state") as source:
        link.decide(decision)
        until(lambda: steps(source) == [10])
        assert polled(source)[0].digest == decision.digest
    assert link.offsets == [0, 4 * PIECE]


def test_what_was_falsified_on_its_way_is_told_and_never_appears(run: RunDir, tmp_path: Path) -> None:
    link = Link(run)
    link.falsified = True
    woken = threading.Event()
    with followed(link, tmp_path / "state", wake=woken.set) as source:
        link.decide(publish(run, 10))
        until(lambda: "cannot download step 10 from the evaluator" in source.problem)
        assert "SHA-256" in source.problem
        assert steps(source) == []
        link.falsified = False
        until(lambda: steps(source) == [10])
    assert woken.is_set()


def test_a_decision_for_what_is_no_checkpoint_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    link = Link(RunDir(tmp_path / "run"))
    outside = tmp_path / "elsewhere"
    digests = ["", "..", "../../elsewhere", str(outside), "0" * 63, "G" * 64]
    decided = [*((10, digest) for digest in digests), (-1, "0" * 64), (MAX_STEP + 1, "0" * 64)]
    with followed(link, tmp_path / "state") as source:
        for step, digest in decided:
            with pytest.raises(ValueError, match=r"it decided for step .*, which is no checkpoint"):
                link.decide(ServingDecision(step=step, digest=digest, sequence=1, evaluator_id="e"))
        assert source.current is None
    assert not (tmp_path / "state" / following.FOLLOWED_FILE).exists()
    assert not outside.exists()


def holds(file: Path, content: bytes) -> bool:
    """Whether a file that may be replaced meanwhile has this content."""
    try:
        return file.read_bytes() == content
    except FileNotFoundError:
        return False


def test_a_download_of_which_a_power_cut_left_less_is_made_again(run: RunDir, tmp_path: Path) -> None:
    link = Link(run)
    decision = publish(run, 10)
    file = RunDir(tmp_path / "state" / following.DOWNLOADS_DIR).checkpoint(10) / MODEL_FILE
    with followed(link, tmp_path / "state") as source:
        link.decide(decision)
        until(lambda: steps(source) == [10])
    content = file.read_bytes()
    file.write_bytes(bytes(len(content)))
    with followed(link, tmp_path / "state") as source:
        link.decide(decision)
        until(lambda: holds(file, content))
    assert link.offsets == [0, 0]


def test_the_failed_download_of_each_decision_is_logged_once(
    run: RunDir, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    link = Link(run)
    link.falsified = True
    with followed(link, tmp_path / "state") as source:
        for step in (10, 20):
            link.decide(publish(run, step))
            until(lambda step=step: f"cannot download step {step}" in source.problem)  # type: ignore[misc]
    logged = [record.message for record in caplog.records if "cannot download" in record.message]
    assert [message.partition(" from")[0] for message in logged] == [
        "cannot download step 10",
        "cannot download step 20",
    ]


def test_checkpoints_come_from_the_evaluator_while_the_shared_folder_is_gone(
    run: RunDir, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = publish(run, 10), publish(run, 20)
    away = run.root.with_name("away")
    link = Link(RunDir(away))
    with followed(link, tmp_path / "state", run=run) as source:
        link.decide(first)
        assert steps(source) == [10, 20]
        run.root.rename(away)
        link.decide(second)
        downloads = RunDir(tmp_path / "state" / following.DOWNLOADS_DIR)
        until(lambda: downloads.checkpoint(20).is_dir())
        assert steps(source) == steps(source) == [10, 20]
        assert link.offsets == [0]
    assert [record.message for record in caplog.records if "shared run folder" in record.message] == [
        f"the shared run folder cannot be read: {run.checkpoints} is gone; waiting for it to return"
    ]


def test_another_decision_is_followed_at_once_and_few_downloads_are_kept(run: RunDir, tmp_path: Path) -> None:
    link = Link(run)
    decisions = [publish(run, step) for step in range(10, 70, 10)]
    with followed(link, tmp_path / "state") as source:
        for decision in decisions:
            link.decide(decision)
            until(lambda decision=decision: decision.step in steps(source))  # type: ignore[misc]
        assert steps(source) == [30, 40, 50, 60]


def test_old_downloads_make_room_on_a_disk_that_is_smaller_than_all_of_them_may_be(run: RunDir, tmp_path: Path) -> None:
    link = Link(run)
    content = bytes(200_000)
    decisions = [publish(run, step, content) for step in (10, 20, 30)]
    with mounted(tmp_path / "state") as disk, followed(link, disk, max_download_mib=1024) as source:
        fill(disk, leave=5 * len(content) // 2)
        for decision in decisions:
            link.decide(decision)
            until(lambda decision=decision: decision.step in steps(source))  # type: ignore[misc]
        assert steps(source) == [20, 30]
        link.decide(publish(run, 40, bytes(DISK_BYTES)))
        until(lambda: "it takes 1.0 MiB more, and" in source.problem)


def test_the_last_decision_outlives_a_restart_and_another_evaluator_is_refused(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "CONTACT_SECONDS", 0.05)
    link = Link(run)
    decision = publish(run, 10)
    with followed(link, tmp_path / "state") as source:
        link.decide(decision)
        until(lambda: steps(source) == [10])
    with followed(link, tmp_path / "state") as source:
        assert source.current is None
        until(lambda: source.current == decision)
        with pytest.raises(AnotherEvaluatorError, match=r"another evaluator \(other\)"):
            link.decide(ServingDecision(step=10, digest=decision.digest, sequence=1, evaluator_id="other"))
        assert source.current == decision


def test_an_evaluator_that_replaces_the_one_followed_so_far_is_followed_and_the_old_one_no_longer(
    run: RunDir, tmp_path: Path
) -> None:
    link = Link(run)
    decision = publish(run, 10)
    old, new, third = ("0" * 32, "1" * 32, "2" * 32)
    before = replace(decision, evaluator_id=old, sequence=7)
    after = replace(decision, evaluator_id=new, sequence=1, replaces=(third, old))
    for _ in range(2):  # also after a restart
        with followed(link, tmp_path / "state") as source:
            link.decide(before)
            with pytest.raises(AnotherEvaluatorError, match=f"start that evaluator with --replaces-evaluator {old}"):
                link.decide(replace(after, replaces=(third,)))
            assert source.current == before
    with followed(link, tmp_path / "state") as source:
        until(lambda: steps(source) == [10])
        after = replace(publish(run, 5), evaluator_id=new, sequence=1, replaces=(third, old))
        link.decide(after)
        assert source.current == after
        until(lambda: steps(source) == [5])
        with pytest.raises(AnotherEvaluatorError):
            link.decide(before)
        assert source.current == after


def test_the_checkpoint_of_a_shadow_is_downloaded_beside_the_decided_one(run: RunDir, tmp_path: Path) -> None:
    link = Link(run)
    decision, candidate = publish(run, 10), publish(run, 20)
    shadow = Shadow(step=20, digest=candidate.digest, share=0.5, tolerance=0.01)
    with followed(link, tmp_path / "state") as source:
        link.decide(replace(decision, shadow=shadow))
        until(lambda: steps(source) == [10, 20])
        assert not source.problem
        link.decide(replace(decision, sequence=11))
        link.decide(replace(candidate, sequence=12))
        until(lambda: source.current is not None and source.current.step == 20)
    assert link.offsets == [0, 0]
    with followed(link, tmp_path / "other") as source, pytest.raises(ValueError, match="which is no checkpoint"):
        link.decide(replace(decision, shadow=replace(shadow, digest="../elsewhere")))


def test_a_decided_checkpoint_does_not_give_way_to_that_of_a_shadow(run: RunDir, tmp_path: Path) -> None:
    link = Link(run)
    decision, candidate = publish(run, 10), publish(run, 20)
    shadow = Shadow(step=20, digest=candidate.digest, share=0.5, tolerance=0.01)
    with followed(link, tmp_path / "state", max_download_mib=0) as source:
        link.decide(decision)
        until(lambda: "follow_download_mib is 0" in source.problem)
    size = sum(file.stat().st_size for file in run.checkpoint(10).rglob("*"))
    filler = tmp_path / "state" / following.DOWNLOADS_DIR / "checkpoints"
    with followed(link, tmp_path / "state") as source:
        link.decide(decision)
        until(lambda: steps(source) == [10])
        (RunDir(filler.parent).checkpoint(10) / "filler").write_bytes(bytes(2**20 - size))
        link.decide(replace(decision, sequence=11, shadow=shadow))
        until(lambda: "with step 10, and follow_download_mib is 1" in source.problem)
        assert steps(source) == [10]
