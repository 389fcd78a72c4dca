"""The page in a real browser."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from testkit.browser import Tabs, overflow, running_browser, violations
from testkit.checkpoints import Chief, ones, write_dataset
from testkit.in_process import RunningService, running_service, until
from testkit.ports import free_ports
from testkit.slow_batches import SlowBatches
from understudy.checkpoints import RunDir, TrainingJournal
from understudy.checkpoints.training import TrainingProgress
from understudy.evaluator.records.ledger import Ledger
from understudy.evaluator.types import EvaluationOutcome, EvaluationRecord
from understudy.service.page import change_feed, page_call
from understudy.service.page.change_feed import ChangeFeed

pytestmark = pytest.mark.long

STEPS = (10, 20, 30)
REFUSED_STEP = 40
MANY_STEP = 5
NASTY = "<img src=x onerror=alert(1)>"
"""A dataset's name that a careless page would run."""
METRICS = 1000
STREAMS = 20

LIGHT = {"color_scheme": "light", "viewport": {"width": 1280, "height": 900}}
DARK_AND_NARROW = {"color_scheme": "dark", "viewport": {"width": 390, "height": 844}}
PATHS = (
    "/",
    "/checkpoints/30",
    f"/checkpoints/{REFUSED_STEP}",
    "/compare?first=10&second=20",
    "/tables?first=10&second=20&dataset=test",
    "/acts/compare?first=10&second=20",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder, and a state folder whose ledger has a thousand metrics on a dataset with a nasty name."""
    folder = tmp_path_factory.mktemp("browser")
    chief = Chief(folder / "run")
    for step in STEPS:
        chief.publish(step)
    with TrainingJournal(RunDir(folder / "run")) as journal:
        progress = TrainingProgress(
            steps=100, metrics={"loss": 0.25}, examples_per_second=800.0, input_wait_share=0.125, remaining_seconds=9.0
        )
        journal.record_step(STEPS[-1], progress)
    write_dataset(folder / "test.npz", best_step=STEPS[-1])
    (folder / "state").mkdir()
    ledger = Ledger(folder / "state" / "ledger.sqlite")
    ledger.append(
        EvaluationRecord(
            step=MANY_STEP,
            checkpoint_digest="d",
            dataset=NASTY,
            outcome=EvaluationOutcome.SCORED,
            metrics={f"metric_{number}": float(number) for number in range(METRICS)},
            examples=1,
        )
    )
    ledger.close()
    return folder


def serve(folder: Path, replicas: tuple[str, ...], http_port: int = 0) -> AbstractContextManager[RunningService]:
    return running_service(
        {"run_dir": folder / "run", "eval_data": {"test": folder / "test.npz"}, "http_port": http_port},
        {"min_improvement": 0.0, "resamples": 20, "tables": True},
        replicas=replicas,
        state_dir=folder / "state",
    )


@pytest.fixture(scope="module")
def service(folder: Path, replicas: tuple[str, ...]) -> Iterator[RunningService]:
    with serve(folder, replicas) as running:
        running.wait_ready()
        client = running.client()
        until(lambda: client.status().serving_step == STEPS[-1])
        for step in STEPS:  # evaluated beside each other, one of them may not have served
            client.promote(step)
        client.unpin()
        Chief(folder / "run").publish(REFUSED_STEP)
        until(lambda: any((one.step, one.outcome) == (REFUSED_STEP, "refused") for one in client.list_evaluations()))
        client.predict({"x": ones(1)})
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as browser:
        yield browser


@pytest.fixture
def tabs(browser: Browser) -> Iterator[Tabs]:
    tabs = Tabs(browser)
    yield tabs
    tabs.close()
    assert tabs.errors == []


def url(service: RunningService, path: str = "/") -> str:
    return f"http://{service.http}{path}"


def elements_of(page: Page) -> int:
    return int(page.evaluate("document.getElementsByTagName('*').length"))


def have_the_same_elements(page: Page, other: Page) -> bool:
    return elements_of(page) == elements_of(other)


@pytest.mark.parametrize("look", [LIGHT, DARK_AND_NARROW], ids=["light and wide", "dark and narrow"])
def test_every_page_is_accessible_and_as_wide_as_the_window(
    service: RunningService, tabs: Tabs, look: dict[str, object]
) -> None:
    page = tabs.open(url(service), **look)
    papers = set()
    for path in PATHS:
        page.goto(url(service, path))
        assert violations(page) == [], path
        assert overflow(page) == 0, path
        papers.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    assert papers == {"rgb(255, 255, 255)" if look is LIGHT else "rgb(13, 17, 23)"}


def test_the_overview_shows_its_elements(service: RunningService, tabs: Tabs) -> None:
    page = tabs.open(url(service), **LIGHT)

    assert page.locator("h2").all_inner_texts() == [
        "Served",
        "Next",
        "Traffic",
        "Training",
        "Scores over steps",
        "Checkpoints",
    ]
    expect(page.locator("#state")).to_contain_text("The version policy is latest")
    expect(page.locator("#state")).to_contain_text(f"step {REFUSED_STEP} was held back")
    for number in (
        "calls in a second",
        "p50",
        "p99",
        "examples queued",
        "replicas",
        "memory of",
        "examples in a batch",
    ):
        expect(page.locator("#traffic")).to_contain_text(number)
    for number in (
        "finished",
        "30 of 100",
        "loss of the training0.25",
        "examples per second800",
        "wait for input12.5 %",
    ):
        expect(page.locator("#training")).to_contain_text(number)
    figure = page.locator("figure").first
    box = figure.locator("svg .line").bounding_box()
    assert box is not None
    assert box["width"] > 100
    assert figure.locator("svg .band, svg .mark.refused, svg line.serving").count() >= 3
    figure.locator("summary").click()
    expect(figure.locator("table")).to_be_visible()
    assert page.locator("#checkpoints tbody tr").count() == len(STEPS) + 2


def test_an_open_page_follows_what_is_done_in_another_tab(service: RunningService, tabs: Tabs) -> None:
    watched, acting = tabs.open(url(service), **LIGHT), tabs.open(url(service), **LIGHT)
    watched.locator("summary").first.click()
    elements = None
    for _ in range(3):
        acting.locator("#checkpoints").get_by_role("link", name="step 10", exact=True).click()
        acting.get_by_role("link", name="Serve and pin").click()
        expect(acting.locator("main")).to_contain_text(f"Step 10 will be served instead of step {STEPS[-1]}.")
        acting.get_by_role("button", name="Serve and pin step 10").click()
        expect(watched.locator("#state")).to_contain_text("An operator pinned it")
        expect(watched.locator("figure > svg").first.locator(".mark.rolled-back")).to_have_count(1)
        expect(watched.locator("details").first).to_have_attribute("open", "")
        acting.get_by_role("link", name="Unpin step 10").click()
        acting.get_by_role("button", name="Unpin step 10").click()
        expect(watched.locator("#state")).not_to_contain_text("An operator pinned it")
        expect(watched.locator("figure > svg").first.locator(".mark.served")).to_have_count(len(STEPS))
        now = elements_of(watched)
        elements = elements or now
        assert now == elements


def test_a_step_is_pinned_and_unpinned_without_javascript(service: RunningService, tabs: Tabs) -> None:
    page = tabs.open(url(service, "/checkpoints/20"), java_script_enabled=False, **DARK_AND_NARROW)
    page.get_by_role("link", name="Serve and pin").click()
    page.get_by_role("button", name="Serve and pin step 20").click()
    expect(page.locator("#state")).to_contain_text("An operator pinned it")
    page.get_by_role("link", name="Unpin step 20").click()
    page.get_by_role("button", name="Unpin step 20").click()
    expect(page.locator("#state")).not_to_contain_text("An operator pinned it")
    expect(page.locator("figure svg").first).to_be_attached()


def test_a_comparison_and_a_life_are_shown(service: RunningService, tabs: Tabs) -> None:
    page = tabs.open(url(service, "/compare?first=10&second=20"), **LIGHT)
    expect(page.locator("main")).to_contain_text("with intervals of 95 % from 20 resamples")
    page.get_by_role("link", name="Compare them now").click()
    page.get_by_label("Dataset").select_option("test")
    page.get_by_role("button", name="Compare").click()
    expect(page.locator("h1")).to_contain_text("step 20 beside step 10")
    page.goto(url(service, "/checkpoints/20"))
    page.get_by_role("link", name="Confusion, curves and reliability on test").click()
    expect(page.locator("h3").first).to_have_text("Residuals")
    expect(page.locator("figure svg .bar").nth(3)).to_be_attached()
    page.goto(url(service, "/checkpoints/20"))
    events = page.get_by_role("region", name="Life of the checkpoint").locator("tbody th").all_inner_texts()
    assert events[:5] == ["committed", "seen", "verified", "loaded", "warmed up"]
    assert "accepted on test" in events


@pytest.mark.parametrize("options", [LIGHT, {**DARK_AND_NARROW, "java_script_enabled": False}])
def test_a_page_tells_how_far_a_comparison_is_until_it_is_cancelled(
    service: RunningService, tabs: Tabs, monkeypatch: pytest.MonkeyPatch, options: dict[str, object]
) -> None:
    monkeypatch.setattr(page_call, "TELL_SECONDS", 0.05)
    slow = SlowBatches(monkeypatch)
    page = tabs.open(url(service, "/acts/compare?first=10&second=20"), **options)
    page.get_by_role("button", name="Compare").click(no_wait_after=True)
    expect(page.locator(".told:visible")).to_contain_text(re.compile(r"\d+ of \d+ examples"))
    assert page.locator(".told:visible").count() == 1
    if options is LIGHT:
        assert violations(page) == []
    page.get_by_role("link", name="Cancel").click()
    expect(page.locator("h1")).to_contain_text("step 20")
    slow.release()


def test_an_evaluation_that_took_a_while_ends_at_the_page_of_the_checkpoint(
    service: RunningService, tabs: Tabs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_call, "QUICK_SECONDS", 0.0)
    page = tabs.open(url(service, "/acts/evaluate?step=10"), **LIGHT)
    page.get_by_role("button", name="Evaluate").click()
    page.wait_for_url(url(service, "/checkpoints/10"))
    expect(page.locator("#life")).to_contain_text("Entries of the ledger")


def test_everything_can_be_reached_with_the_keyboard(service: RunningService, tabs: Tabs) -> None:
    page = tabs.open(url(service), **LIGHT)
    reachable = page.evaluate(
        "[...document.querySelectorAll('a[href], button, select, summary, [tabindex=\"0\"]')]"
        ".filter(one => one.checkVisibility()).length"
    )
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    seen = 0
    while seen <= reachable and page.evaluate("document.activeElement !== document.body"):
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid"
        seen += 1
        page.keyboard.press("Tab")
    assert seen == reachable


def test_markup_in_the_name_of_a_dataset_is_text_and_a_thousand_metrics_are_paged(
    service: RunningService, tabs: Tabs
) -> None:
    page = tabs.open(url(service), **LIGHT)

    assert page.locator("figcaption").filter(has_text=NASTY).count() > 0
    assert page.locator("img").count() == 0
    assert page.locator("figure").count() == 12
    expect(page.locator("#curves")).to_contain_text("There are more metrics than charts can show")
    page.get_by_role("link", name=re.compile("More charts")).click()
    page.wait_for_url(url(service, "/?charts=12"))
    expect(page.locator("figure")).to_have_count(12)
    page.goto(url(service, f"/checkpoints/{MANY_STEP}"))
    assert page.locator("thead th").filter(has_text="metric_").count() == METRICS


def test_the_value_at_the_pointer_is_read_out_until_it_leaves_the_chart(service: RunningService, tabs: Tabs) -> None:
    page = tabs.open(url(service), **LIGHT)
    figure = page.locator("figure").first
    newest = figure.locator(".readout").inner_text()
    value = figure.locator("tbody tr").filter(has=page.get_by_role("rowheader", name="20", include_hidden=True))
    frame = figure.locator("svg .frame")
    frame.scroll_into_view_if_needed()
    box = frame.bounding_box()
    assert box is not None
    share = 1 / 3  # of the steps 10 to 40
    page.mouse.move(box["x"] + share * box["width"], box["y"] + box["height"] / 2)

    expect(figure.locator(".readout")).to_have_text(f"step 20: {value.locator('td').text_content()}")
    expect(figure.locator("svg .guide")).to_have_count(1)
    page.mouse.move(2, 2)
    expect(figure.locator(".readout")).to_have_text(newest)
    expect(figure.locator("svg .guide")).to_have_count(0)


def test_a_page_left_open_neither_grows_nor_complains_when_streams_end(
    service: RunningService, tabs: Tabs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(change_feed, "STREAM_SECONDS", 0.1)
    monkeypatch.setattr(change_feed, "APART_SECONDS", 0.0)
    monkeypatch.setattr(change_feed, "KEEP_ALIVE_SECONDS", 0.05)
    place, opened = ChangeFeed.place, Counter[str]()

    def counting(feed: ChangeFeed) -> AbstractContextManager[None]:
        opened["streams"] += 1
        return place(feed)

    monkeypatch.setattr(ChangeFeed, "place", counting)
    page = tabs.open(url(service), **LIGHT)
    elements = elements_of(page)
    until(lambda: opened["streams"] > STREAMS)

    assert elements_of(page) == elements
    expect(page.locator(".lost")).to_be_empty()


def test_an_open_page_survives_restarts_of_the_server_and_says_while_it_is_gone(
    folder: Path, replicas: tuple[str, ...], tabs: Tabs
) -> None:
    state = folder / "state"
    (port,) = free_ports(1)
    other = folder / "other"
    other.mkdir()
    (other / "run").symlink_to(folder / "run")
    (other / "test.npz").symlink_to(folder / "test.npz")
    assert state.exists()
    with serve(other, replicas, port) as first:
        first.wait_ready()
        page = tabs.open(f"http://127.0.0.1:{port}/", **LIGHT)
        expect(page.locator("#state")).to_contain_text("The version policy is latest")
        page.evaluate("window.is_the_same_page = true")
    expect(page.locator(".lost")).to_contain_text("Not connected: this is the state of")
    for step in STEPS[:2]:
        with serve(other, replicas, port) as again:
            again.wait_ready()
            again.client().promote(step)
            expect(page.locator("#state .large")).to_have_text(f"step {step}")
            expect(page.locator("#state")).to_contain_text("An operator pinned it")
            expect(page.locator(".lost")).to_be_empty()
            expect(page.locator(".readiness")).to_have_text("ready")
            expect(page.locator("#checkpoints")).not_to_contain_text("waiting")
            anew = tabs.open(f"http://127.0.0.1:{port}/", **LIGHT)
            until(partial(have_the_same_elements, page, anew))
            anew.close()
    assert page.evaluate("window.is_the_same_page")
    page.close()
    lost, tabs.errors = tabs.errors, []
    assert all(error.startswith(("htmx:", "[object Event]")) or "net::ERR_" in error for error in lost), lost
