"""What callers do on the page, over real requests as browsers send them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from integration.test_page import basic, callers, token_of

from testkit.checkpoints import Chief, write_dataset
from testkit.html_pages import Page
from testkit.in_process import RunningService, running_service, until
from testkit.slow_batches import SlowBatches
from testkit.webhook_receiver import SECRET, Receiver, receiving, status
from understudy.service.page import page_call

pytestmark = pytest.mark.long

STEPS = (10, 20, 30)
DATASET = "test"
SECONDS = 30.0
SEE_OTHER = 303
LETTERS = 2 * len(STEPS) - 1
"""The fewest that are left after one was dropped: each step is committed and scored."""
ACTS = ("pin", "unpin", "roll-back", "evaluate", "compare", "resend-events", "drop-events")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("acts")
    chief = Chief(folder / "run")
    for step in STEPS:
        chief.publish(step)
    write_dataset(folder / "test.npz", best_step=STEPS[-1])
    callers(folder)
    return folder


@contextmanager
def served(folder: Path, replicas: tuple[str, ...], state: str, **settings: Any) -> Iterator[RunningService]:
    options = {"run_dir": folder / "run", "eval_data": {DATASET: folder / "test.npz"}, **settings}
    with running_service(options, {"resamples": 20}, replicas=replicas, state_dir=folder / state) as running:
        running.wait_ready()
        yield running


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    """Receives the events of the service, and accepts none; then they are tried again soon."""
    with receiving() as receiver, pytest.MonkeyPatch.context() as patch:
        patch.setattr("understudy.service.events.deliveries._LONGEST_PAUSE_SECONDS", 0.05)
        receiver.always = status(500)
        yield receiver


@pytest.fixture(scope="module")
def service(replicas: tuple[str, ...], folder: Path, receiver: Receiver) -> Iterator[RunningService]:
    secrets = folder / "secrets"
    secrets.write_text(SECRET)
    events = {"webhook": (f"{receiver.url}?key=s3cr3t",), "webhook_secret_file": secrets, "event_retry_hours": 0.0}
    with served(folder, replicas, "state", callers=folder / "callers.toml", **events) as running:
        client = running.client(token=token_of("client"))
        until(lambda: len(list(client.list_evaluations())) >= len(STEPS) and client.status().serving_step == STEPS[-1])
        yield running


class Browser:
    """Follows links and sends forms as a browser does that has no JavaScript."""

    def __init__(self, service: RunningService, caller: str | None) -> None:
        self.origin = f"http://{service.http}"
        headers = {} if caller is None else basic(caller)
        self.client = httpx.Client(base_url=self.origin, headers=headers, timeout=SECONDS)

    def get(self, path: str) -> httpx.Response:
        return self.client.get(path)

    def fields(self, path: str) -> dict[str, str]:
        """Return the hidden fields of the form on a page."""
        content = self.get(path).text
        found = re.findall(r'<input type="hidden" name="([^"]*)" value="([^"]*)">', content)
        return {name: unescape(value) for name, value in found}

    def send(self, act: str, fields: dict[str, str], **headers: str) -> httpx.Response:
        sent = {"origin": self.origin, **headers}
        return self.client.post(f"/acts/{act}", data=fields, headers={k: v for k, v in sent.items() if v})


@pytest.fixture
def operator(service: RunningService) -> Iterator[Browser]:
    browser = Browser(service, "operator")
    with browser.client:
        yield browser


@pytest.fixture(autouse=True)
def everything_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a slow machine answer at once, too."""
    monkeypatch.setattr(page_call, "QUICK_SECONDS", SECONDS)


@pytest.fixture
def at_rest(service: RunningService) -> Iterator[None]:
    yield
    client = service.client(token=token_of("client"))
    client.unpin()
    until(lambda: client.status().serving_step == STEPS[-1])


@pytest.mark.usefixtures("at_rest")
def test_what_was_done_is_shown_at_once(operator: Browser) -> None:
    operator.send("pin", operator.fields("/acts/pin?step=20"))
    unpin = operator.fields("/acts/unpin")
    assert "An operator pinned it" in operator.get("/").text
    operator.send("unpin", unpin)
    assert "An operator pinned it" not in operator.get("/").text


@pytest.mark.usefixtures("at_rest")
def test_a_step_is_pinned_rolled_back_and_unpinned_after_a_confirmation_with_the_numbers(
    service: RunningService, operator: Browser
) -> None:
    now = service.client(token=token_of("client")).status
    question = Page(operator.get("/acts/pin?step=10").text).text

    assert "Step 10 will be served instead of step 30." in question
    assert "until it is unpinned" in question
    assert "the version policy (latest) and the gate do not apply" in question
    assert len(re.findall(r"test: mae\s[\d.]+, loss\s\d", question)) == 2
    assert now().serving_step == 30

    with structlog.testing.capture_logs() as lines:
        done = operator.send("pin", operator.fields("/acts/pin?step=10"))
    assert (done.status_code, done.headers["location"]) == (SEE_OTHER, "/")
    assert (now().serving_step, now().pinned_step) == (10, 10)
    assert "An operator pinned it" in Page(operator.get("/").text).text
    (line,) = [line for line in lines if line["event"] == "serving version requested"]
    assert (line["caller"], line["action"], line["method"]) == (
        "operator",
        "pin",
        "/understudy.v1.ModelService/Promote",
    )
    assert (line["serving_step"], line["previous_step"], line["outcome"]) == (10, 30, "OK")

    assert "Step 30 will be served instead of step 10." in Page(operator.get("/acts/roll-back").text).text
    assert operator.send("roll-back", operator.fields("/acts/roll-back")).status_code == SEE_OTHER
    assert (now().serving_step, now().pinned_step) == (30, 30)

    assert "Step 30 is served already, and stays." in Page(operator.get("/acts/unpin").text).text
    assert operator.send("unpin", operator.fields("/acts/unpin")).status_code == SEE_OTHER
    assert now().pinned_step is None
    assert operator.get("/acts/unpin").status_code == 404


def test_the_life_of_a_checkpoint_is_told_with_times(operator: Browser) -> None:
    text = " ".join(Page(operator.get("/checkpoints/30").text).text.split())
    life = text[text.index("since committed") : text.index("Entries of the ledger")]
    found = re.findall(r"(committed|seen|verified|loaded|warmed up|served|scored on test) ?(?=\d{4}-)", life)

    assert found[:5] == ["committed", "seen", "verified", "loaded", "warmed up"]
    assert {"served", "scored on test"} <= set(found)


def test_a_dataset_is_evaluated_and_two_versions_compared_on_request(operator: Browser) -> None:
    question = operator.get("/acts/evaluate?step=10").text
    assert '<option value="test">' in question
    assert "has a score on test already" in Page(question).text
    done = operator.send("evaluate", {**operator.fields("/acts/evaluate?step=10"), "dataset": DATASET})
    assert (done.status_code, done.headers["location"]) == (SEE_OTHER, "/checkpoints/10")

    fields = operator.fields("/acts/compare?first=30&second=10")
    compared = Page(operator.send("compare", {**fields, "dataset": DATASET}).text)
    recorded = Page(operator.get("/compare?first=30&second=10").text)
    for page in (compared, recorded):
        assert page.headings[:2] == ["model: step 10 beside step 30", DATASET]
        assert "with intervals of 95 % from" in page.text
        assert re.search(r"loss[\d.e-]+ .*\[[\d.e-]+, [\d.e-]+\]", page.text)
    assert "Which examples changed is not known: step 10 was scored on 'test' without tables" in recorded.text


def send_slowly(operator: Browser, act: str, fields: dict[str, str]) -> Any:
    return operator.client.stream("POST", f"/acts/{act}", data=fields, headers={"origin": operator.origin})


def test_what_takes_a_while_tells_how_far_it_is_and_ends_with_the_result(
    operator: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_call, "QUICK_SECONDS", 0.0)
    monkeypatch.setattr(page_call, "TELL_SECONDS", 0.05)
    slow = SlowBatches(monkeypatch)
    question = operator.get("/acts/compare?first=30&second=10").text
    assert "The next page tells how far it is; leaving that page cancels it." in Page(question).text
    fields = {**operator.fields("/acts/compare?first=30&second=10"), "dataset": DATASET}
    with send_slowly(operator, "compare", fields) as response:
        assert (response.status_code, response.headers["x-accel-buffering"]) == (200, "no")
        chunks = response.iter_text()
        content = ""
        while not re.search(r"\d of \d+ examples", content):
            content += next(chunks)
        slow.release()
        content += "".join(chunks)
    page = Page(content)

    done, of = map(int, re.findall(r"(\d+) of (\d+) examples", content)[0])
    assert 0 < done < of
    assert page.headings[:2] == ["model: step 10 beside step 30", DATASET]
    assert "with intervals of 95 % from" in page.text
    evaluated = operator.send("evaluate", {**operator.fields("/acts/evaluate?step=10"), "dataset": DATASET})
    assert evaluated.status_code == 200
    assert 'content="0; url=/checkpoints/10"' in evaluated.text
    assert Page(evaluated.text).headings[0] == "model: step 10 is evaluated"


def test_who_leaves_cancels_what_is_computed(
    service: RunningService, operator: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_call, "QUICK_SECONDS", 0.0)
    slow = SlowBatches(monkeypatch)
    fields = {**operator.fields("/acts/compare?first=30&second=10"), "dataset": DATASET}
    client = service.client(token=token_of("viewer"))

    def ended() -> list[str]:
        return re.findall(r'grpc_server_handled_total\{(?=.*"Compare").*\} [1-9].*', client.metrics())

    before = ended()
    with send_slowly(operator, "compare", fields) as response:
        next(response.iter_text())
    until(lambda: ended() != before)
    assert "cancel" in "".join({*ended()} - {*before}).lower()
    read = slow.read
    slow.release()
    assert operator.get("/").status_code == 200
    assert slow.read <= read + 1


def test_a_failure_while_it_is_told_how_far_something_is_ends_the_page_with_a_sentence(
    operator: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_call, "QUICK_SECONDS", 0.0)
    fields = operator.fields("/acts/evaluate?step=10")
    failed = operator.send("evaluate", {**fields, "dataset": "<b>other</b>"})

    assert failed.status_code == 200
    assert "there is no dataset '<b>other</b>'" in Page(failed.text).text
    assert "<b>" not in failed.text


def dead_letters(operator: Browser) -> int:
    found = re.search(r"(\d+) events? could not be delivered", operator.get("/").text)
    return int(found[1]) if found else 0


def links(operator: Browser, act: str) -> list[str]:
    """Return the links on the page to the questions before an act."""
    return [unescape(each) for each in re.findall(rf'href="(/acts/{act}\?[^"]*)"', operator.get("/").text)]


def test_a_single_dead_letter_is_dropped_and_the_others_stay(operator: Browser) -> None:
    until(lambda: dead_letters(operator) >= 2 * len(STEPS))
    oldest, *_, newest = (each for each in links(operator, "drop-events") if "letter=" in each)
    question = Page(operator.get(oldest).text).text
    assert "Drop 1 dead letter?" in question
    assert re.search(r"about step \d+: committed\. What is dropped is removed for good", question)

    fields = operator.fields(oldest)
    with structlog.testing.capture_logs() as lines:
        assert operator.send("drop-events", {**fields, "last_letter": "9999"}).status_code == 403, "not as it was shown"
        assert operator.send("drop-events", fields).status_code == SEE_OTHER
    done = [line for line in lines if line["event"] == "dead letters"]
    assert [(line["events"], len(line["first_id"])) for line in done] == [(1, 36)]
    assert oldest not in links(operator, "drop-events")
    assert newest in links(operator, "drop-events")
    gone = operator.send("drop-events", fields)
    assert gone.status_code == 404
    assert "there is no such dead letter to" in Page(gone.text).text


@pytest.mark.usefixtures("at_rest")
def test_dead_letters_are_shown_and_sent_again_or_dropped_by_who_may(
    service: RunningService, operator: Browser, receiver: Receiver
) -> None:
    client = service.client(token=token_of("client"))
    viewer = Browser(service, "viewer")

    with viewer.client:
        until(lambda: dead_letters(operator) >= LETTERS)
        page = viewer.get("/").text
    assert "status 500" in page
    assert "/acts/" not in page
    assert "s3cr3t" not in page
    assert SECRET[6:] not in page

    receiver.always = status(204)
    attempted = len(receiver.received)
    question = Page(operator.get(links(operator, "resend-events")[0]).text).text
    assert re.search(r"Send \d+ dead letters again", question)
    assert "about steps 10 to 30: " in question
    assert "Each keeps its id" in question
    with structlog.testing.capture_logs() as lines:
        done = operator.send("resend-events", operator.fields(links(operator, "resend-events")[0]))
    assert (done.status_code, done.headers["location"]) == (SEE_OTHER, "/")
    until(lambda: dead_letters(operator) == 0)
    until(lambda: re.search(r"understudy_events_waiting\{.*\} 0", client.metrics()) is not None)
    assert len(receiver.received) - attempted >= LETTERS
    (line,) = [line for line in lines if line["event"] == "dead letters"]
    assert (line["caller"], line["action"], line["method"]) == (
        "operator",
        "resend-events",
        "/understudy.Page/ResendEvents",
    )
    assert line["events"] >= LETTERS

    receiver.always = status(500)
    client.promote(10)
    until(lambda: dead_letters(operator) == 1)
    fields = operator.fields(links(operator, "drop-events")[0])
    client.promote(20)
    until(lambda: dead_letters(operator) == 2)
    assert operator.send("drop-events", fields).status_code == SEE_OTHER
    assert "1 event could not" in operator.get("/").text, "the one that came after the question is still there"
    again = operator.send("drop-events", fields)
    assert again.status_code == 404
    assert "there is no such dead letter to" in Page(again.text).text


@pytest.mark.parametrize(
    ("headers", "change", "words"),
    [
        ({"origin": "http://elsewhere.example"}, {}, "was not sent from a page of this server"),
        ({"origin": "null"}, {}, "was not sent from a page of this server"),
        ({"origin": ""}, {}, "was not sent from a page of this server"),
        ({"origin": "http://[", "host": "localhost"}, {}, "was not sent from a page of this server"),
        ({"sec-fetch-site": "cross-site"}, {}, "was not sent from a page of this server"),
        ({"sec-fetch-site": "same-site"}, {}, "was not sent from a page of this server"),
        ({}, {"token": "0.0"}, "confirm again"),
        ({}, {"token": ""}, "confirm again"),
        ({}, {"step": "20"}, "confirm again"),
    ],
)
def test_a_form_that_was_not_shown_to_the_caller_by_this_server_does_nothing(
    service: RunningService, operator: Browser, headers: dict[str, str], change: dict[str, str], words: str
) -> None:
    fields = {**operator.fields("/acts/pin?step=10"), **change}
    refused = operator.send("pin", fields, **headers)

    assert refused.status_code == 403
    assert words in Page(refused.text).text
    assert service.client(token=token_of("client")).status().pinned_step is None


def test_a_form_is_for_one_caller_and_for_one_act(service: RunningService, operator: Browser) -> None:
    client = Browser(service, "client")
    with client.client:
        fields = operator.fields("/acts/pin?step=10")
        by_another = client.send("pin", fields)
        for_another = operator.send("roll-back", fields)

    assert (by_another.status_code, for_another.status_code) == (403, 403)


@pytest.mark.usefixtures("at_rest")
def test_what_was_confirmed_is_not_done_if_something_else_is_served_by_then(
    service: RunningService, operator: Browser
) -> None:
    client = service.client(token=token_of("client"))
    fields = operator.fields("/acts/pin?step=10")
    client.promote(20)
    late = operator.send("pin", fields)

    assert late.status_code == 400
    assert "the serving step is 20 and the pinned one 20, instead of 30 and none" in Page(late.text).text
    assert client.status().serving_step == 20


def test_callers_see_and_do_only_what_their_groups_allow(service: RunningService, operator: Browser) -> None:
    fields = operator.fields("/acts/pin?step=10")
    for name, promotes, evaluates in (("viewer", False, False), ("client", True, False), ("operator", True, True)):
        browser = Browser(service, name)
        with browser.client:
            page = browser.get("/checkpoints/10").text
            assert ("/acts/pin" in page, "/acts/evaluate" in page) == (promotes, evaluates)
            assert ("/acts/compare" in page) == evaluates
            assert browser.get("/acts/pin?step=10").status_code == (200 if promotes else 403)
            if not promotes:
                refused = browser.send("pin", fields)
                assert refused.status_code == 403
                assert "viewer may not call Promote, as it is not in the group promote" in Page(refused.text).text
            if not evaluates:
                refused = browser.send("evaluate", fields)
                assert refused.status_code == 403
                assert "is not in the group evaluate" in Page(refused.text).text


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/acts/pin?step=77", 404, "the checkpoint of step 77 does not exist"),
        ("/acts/pin", 400, "the parameter step is missing"),
        ("/acts/compare?first=10&second=10", 400, "compared with itself"),
        ("/acts/delete", 404, "the page has no act"),
        ("/acts/drop-events?destination=<b>", 404, "there are no dead letters to '<b>'"),
        ("/compare?first=10", 400, "two different steps"),
        ("/compare?first=10&second=77", 404, "step 77 has no score"),
    ],
)
def test_a_question_that_makes_no_sense_is_answered_with_a_sentence(
    operator: Browser, path: str, status: int, words: str
) -> None:
    response = operator.get(path)

    assert response.status_code == status
    assert words in Page(response.text).text


def test_errors_of_what_is_done_are_sentences_and_other_bodies_are_refused(operator: Browser) -> None:
    fields = operator.fields("/acts/evaluate?step=10")
    unknown = operator.send("evaluate", {**fields, "dataset": "<b>other</b>"})
    as_json = operator.client.post("/acts/pin", json=fields, headers={"origin": operator.origin})
    large = operator.send("pin", {**fields, "more": "x" * 20_000})

    assert unknown.status_code == 404
    assert "there is no dataset '<b>other</b>'" in Page(unknown.text).text
    assert "<b>" not in unknown.text
    assert as_json.status_code == 400
    assert "a form" in Page(as_json.text).text
    assert large.status_code == 413
    assert operator.get("/acts/evaluate?step=10").status_code == 200


def test_without_callers_the_page_acts_only_under_an_address_and_not_at_all_read_only(
    replicas: tuple[str, ...], folder: Path
) -> None:
    with served(folder, replicas, "open", allowed_hosts=("rebound.example",)) as running:
        browser = Browser(running, None)
        with browser.client:
            fields = browser.fields("/acts/pin?step=10")
            other = {
                path: browser.client.get(path, headers={"host": "other.example"}) for path in ("/", "/metrics", "/v2")
            }
            named = {"host": "rebound.example:8501", "origin": "http://rebound.example:8501"}
            elsewhere = browser.client.get("/acts/pin?step=10", headers=named)
            refused = browser.send("pin", fields, **named)
            done = browser.send("pin", fields)
            hidden = browser.client.get("/checkpoints/10", headers=named).text
    with served(folder, replicas, "read-only", read_only=True) as running:
        browser = Browser(running, None)
        with browser.client:
            page = browser.get("/checkpoints/10").text
            statuses = {act: browser.send(act, {}) for act in ACTS}

    assert (elsewhere.status_code, refused.status_code, done.status_code) == (403, 403, SEE_OTHER)
    assert all(response.status_code == 403 and "other.example" in response.text for response in other.values())
    assert "only if it is opened by an address or as localhost" in Page(refused.text).text
    assert "/acts/" not in hidden
    assert "/acts/" not in page
    for act, response in statuses.items():
        assert response.status_code == 403, act
        assert "read-only" in Page(response.text).text
