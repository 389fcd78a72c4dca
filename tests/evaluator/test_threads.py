"""How the evaluator's threads end, and how one of them follows what serves."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from understudy.evaluator.threads import Promotion, PromotionThread, join

WAIT_SECONDS = 30.0
SHORT_SECONDS = 0.01


class Work:
    """Work that takes until `may_end` is set, and notes each promotion."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.may_end = threading.Event()
        self.seen: list[Promotion] = []
        self.is_done = threading.Event()

    def __call__(self, promotion: Promotion) -> None:
        self.seen.append(promotion)
        self.began.set()
        assert self.may_end.wait(WAIT_SECONDS)
        if len(self.seen) > 1:
            self.is_done.set()


@pytest.fixture
def work() -> Work:
    return Work()


@pytest.fixture
def thread(work: Work) -> Iterator[PromotionThread]:
    thread = PromotionThread("understudy-test", work)
    thread.start()
    yield thread
    work.may_end.set()
    thread.close(WAIT_SECONDS, error="the work went on after")


def test_of_several_promotions_during_the_work_only_the_newest_follows(work: Work, thread: PromotionThread) -> None:
    thread.promoted(1)
    assert work.began.wait(WAIT_SECONDS)
    thread.promoted(2)
    thread.promoted(3)
    work.may_end.set()

    assert work.is_done.wait(WAIT_SECONDS)
    assert work.seen == [Promotion(1, 1), Promotion(3, 3)]


def test_the_same_step_is_followed_again(work: Work, thread: PromotionThread) -> None:
    work.may_end.set()
    thread.promoted(7)
    assert work.began.wait(WAIT_SECONDS)
    work.began.clear()
    thread.promoted(7)

    assert work.began.wait(WAIT_SECONDS)
    assert {promotion.step for promotion in work.seen} == {7}


def test_work_is_unsettled_by_the_next_promotion(thread: PromotionThread) -> None:
    thread.promoted(1)
    first = thread.newest
    results: list[bool] = []
    waiter = threading.Thread(
        target=lambda: results.append(thread.has_settled(lambda: thread.newest == first, WAIT_SECONDS))
    )
    waiter.start()
    thread.promoted(2)
    waiter.join(WAIT_SECONDS)

    assert results == [False]
    second = thread.newest
    assert thread.has_settled(lambda: thread.newest == second, SHORT_SECONDS)


def test_work_that_does_not_end_is_named(work: Work, thread: PromotionThread) -> None:
    thread.promoted(1)
    assert work.began.wait(WAIT_SECONDS)

    with pytest.raises(TimeoutError, match=r"^the work went on after 0\.01 s$"):
        thread.close(SHORT_SECONDS, error="the work went on after")
    assert thread.newest is None


def test_a_thread_that_was_not_started_has_ended() -> None:
    thread = threading.Thread()
    join(thread, WAIT_SECONDS, error="never")
    assert thread.ident is None
