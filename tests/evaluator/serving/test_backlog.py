from __future__ import annotations

import threading

from testkit.text_lifecycle import WAIT_SECONDS
from understudy.evaluator.serving.backlog import Backlog
from understudy.evaluator.types import CheckpointInfo


def info(step: int) -> CheckpointInfo:
    return CheckpointInfo(step=step, created_at=float(step), digest=str(step), final=False)


def offer(backlog: Backlog, *steps: int, without: tuple[int, ...] = (), before: int | None = None) -> None:
    backlog.update(
        offered=map(info, steps),
        withdrawn=[info(step).key for step in without],
        before=None if before is None else info(before).key,
    )


def test_the_checkpoint_that_is_being_evaluated_counts_as_waiting() -> None:
    backlog = Backlog()
    offer(backlog, 1, 2)
    assert len(backlog) == 2
    assert backlog.next() == info(1)
    assert len(backlog) == 2
    backlog.finished()
    assert len(backlog) == 1


def test_what_is_finished_comes_again_after_the_next_update_unless_it_is_withdrawn() -> None:
    backlog = Backlog()
    offer(backlog, 1, 2, 3)
    assert backlog.next() == info(1)
    offer(backlog, 1)
    assert len(backlog) == 3, "it is being evaluated"
    backlog.finished()
    assert backlog.next() == info(2)
    offer(backlog, without=(2,))
    backlog.finished()
    offer(backlog)
    assert [backlog.next(), backlog.next()] == [info(1), info(3)]


def test_nothing_from_the_limit_on_is_returned() -> None:
    backlog = Backlog()
    offer(backlog, 1, 3, before=2)
    assert len(backlog) == 1
    assert backlog.next() == info(1)
    backlog.finished()
    offer(backlog, without=(1,), before=2)
    later: list[CheckpointInfo | None] = []
    waiting = threading.Thread(target=lambda: later.append(backlog.next()))
    waiting.start()
    assert len(backlog) == 0
    offer(backlog, 2)
    waiting.join(WAIT_SECONDS)
    assert later == [info(2)]


def test_what_replaces_the_others_leaves_the_one_that_is_being_evaluated() -> None:
    backlog = Backlog()
    assert backlog.replace([info(10)]) is None
    assert backlog.next() == info(10)
    assert backlog.replace([info(10)]) == info(10)
    assert backlog.replace([info(30)]) == info(10)
    backlog.finished()
    assert backlog.next() == info(30)
    backlog.close()
    assert backlog.next() is None
