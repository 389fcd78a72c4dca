"""The page at the HTTP port, which is the same with every front end."""

from __future__ import annotations

import base64
import html
import json
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import keras
import numpy as np
import pytest

from testkit.checkpoints import OUTPUTS, WIDTH, Chief, ones, write_dataset
from testkit.html_pages import Page
from testkit.in_process import RunningService, running_service, until
from understudy.service.callers.callers_file import hash_text

ROOT = "/models/digits"
STEPS = (10, 20)
REFUSED_STEP = 30
DATASET = "Test_set.-1"
NASTY = "<img src=x>\"'&{{7*7}}"
"""A metric's name with what HTML, attributes and templates could take for their own."""
SECONDS = 60.0
SOON_SECONDS = 60.0
"""The goal is a second; a busy machine may take longer."""
STREAMS = 4

PATHS = (
    "/",
    "/checkpoints/20",
    "/compare?first=10&second=20",
)


def model(step: int) -> Any:
    x = keras.Input((WIDTH,), name="x")
    made = keras.Model(x, keras.layers.Dense(OUTPUTS, use_bias=False, name="y")(x))
    made.layers[-1].set_weights([np.full((WIDTH, OUTPUTS), step / WIDTH, np.float32)])
    made.compile(optimizer="sgd", loss="mse", metrics=[keras.metrics.MeanAbsoluteError(name=NASTY)])
    return made


def callers(folder: Path) -> Path:
    file = folder / "callers.toml"
    file.write_text(
        "\n".join(
            f'[[callers]]\nname = "{name}"\ngroups = {json.dumps(groups)}\ntokens = ["{hash_text(token_of(name))}"]'
            for name, groups in {
                "viewer": ["observe"],
                "user": ["predict"],
                "client": ["observe", "predict", "promote"],
                "operator": ["observe", "promote", "evaluate"],
            }.items()
        ),
        encoding="utf-8",
    )
    return file


def token_of(name: str) -> str:
    return f"token:of:{name}"


def basic(name: str) -> dict[str, str]:
    return {"authorization": "Basic " + base64.b64encode(f"anyone:{token_of(name)}".encode()).decode()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("page")


@pytest.fixture(scope="module")
def chief(folder: Path) -> Chief:
    return Chief(folder / "run")


@pytest.fixture(scope="module")
def service(replicas: tuple[str, ...], folder: Path, chief: Chief) -> Iterator[RunningService]:
    """A service with two accepted checkpoints and one refused, behind a path, for known callers."""
    for step in STEPS:
        chief.publish_other(step, model(step))
    write_dataset(folder / "test.npz", best_step=STEPS[-1])
    settings = {
        "run_dir": folder / "run",
        "eval_data": {DATASET: folder / "test.npz"},
        "callers": callers(folder),
        "root_path": ROOT,
        "max_connections": 32,  # so 8 to the HTTP port, of which live pages take half
    }
    with running_service(
        settings,
        {"min_improvement": 0.0, "resamples": 20},
        replicas=replicas,
        state_dir=folder / "state",
    ) as running:
        client = running.client(token=token_of("client"))
        running.wait_ready()
        wait_for(client, STEPS[-1], "accepted")
        chief.publish_other(REFUSED_STEP, model(-REFUSED_STEP))
        wait_for(client, REFUSED_STEP, "refused")
        client.predict({"x": ones(1)})
        yield running


def wait_for(client: Any, step: int, outcome: str) -> None:
    for evaluation in client.watch_evaluations():
        if (evaluation.step, evaluation.outcome.lower()) == (step, outcome):
            return


@pytest.fixture
def browser(service: RunningService) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{service.http}", headers=basic("viewer"), timeout=SECONDS) as browser:
        yield browser


def test_the_overview_says_what_is_served_and_why_and_what_was_held_back(browser: httpx.Client) -> None:
    page = Page(browser.get("/").text)
    text = " ".join(page.text.split())

    assert page.headings[:3] == ["model", "Served", "Next"]
    assert "The version policy is latest: it is the newest checkpoint that the gate lets through" in text
    assert re.search(r"The gate's decision: accepted at \S+ \S+ UTC", text)
    assert f"After the serving step, step {REFUSED_STEP} was held back" in text
    assert re.search(rf"best by the min of {DATASET}/loss ?step {STEPS[-1]}: \d", text)
    assert "calls since the start" in text
    for state in ("serving", "accepted", "refused"):
        assert state in text
    for step in (*STEPS, REFUSED_STEP):
        assert f"{ROOT}/checkpoints/{step}" in page.references


def test_each_curve_has_a_picture_with_bands_and_marks_and_a_table_of_its_numbers(browser: httpx.Client) -> None:
    content = browser.get("/").text
    page = Page(content)

    assert page.tags["figure"] == content.count("<svg viewBox=") == page.tags["polyline"] == 2
    assert page.tables == [1, 1]
    assert page.tags["polygon"] >= 1
    pictures = re.findall(r"<svg viewBox=.*?</svg>", content, re.DOTALL)
    for kind in ("refused", "served"):
        assert all(f'class="mark {kind}"' in picture for picture in pictures)
    assert content.count('<line class="serving"') == 2


def test_the_page_of_a_checkpoint_shows_its_entries_with_intervals_and_conditions(browser: httpx.Client) -> None:
    page = Page(browser.get(f"/checkpoints/{REFUSED_STEP}").text)

    assert page.headings[0] == f"model: step {REFUSED_STEP}"
    assert "Entries of the ledger" in page.headings
    assert "better by 0.0" in page.text
    assert "from 20 resamples" in page.text
    assert page.tags["time"] >= 3


@pytest.mark.parametrize("path", PATHS)
def test_names_with_markup_are_escaped_and_nothing_is_inline(browser: httpx.Client, path: str) -> None:
    response = browser.get(path)
    page = Page(response.text)

    assert response.status_code == 200
    assert "<img" not in response.text
    assert not {"img", "style"} & page.tags.keys()
    assert " style=" not in response.text
    assert " on" not in "".join(re.findall(r"<[^>]*>", response.text))
    assert "<script>" not in response.text
    if path in ("/", "/checkpoints/20"):
        assert NASTY in page.text


@pytest.mark.parametrize("path", [*PATHS, "/static/page.css", "/checkpoints/7", "/nothing-here"])
def test_every_answer_has_the_headers_of_a_page_that_loads_only_its_own_files(browser: httpx.Client, path: str) -> None:
    response = browser.get(path)
    if path == "/nothing-here":
        assert response.status_code == 404
        return

    assert response.headers["content-security-policy"].startswith("default-src 'none'; style-src 'self';")
    assert "unsafe" not in response.headers["content-security-policy"]
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "same-origin"
    assert path.startswith("/static") or response.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("prefix", ["", ROOT])
def test_the_page_and_all_it_refers_to_are_under_the_path_of_a_proxy(browser: httpx.Client, prefix: str) -> None:
    references = {
        reference
        for path in ("/", f"/checkpoints/{STEPS[0]}")
        for reference in Page(browser.get(prefix + path).text).references
        if reference not in {"data:,", "#main"}
    }

    assert all(reference.startswith(f"{ROOT}/") for reference in references)
    for reference in references:
        assert browser.get(prefix + reference.removeprefix(ROOT)).status_code == 200, reference
    assert browser.get(f"{prefix}/healthz").status_code == 200


def test_only_callers_who_may_observe_see_the_page_and_a_browser_is_asked_for_a_token(service: RunningService) -> None:
    with httpx.Client(base_url=f"http://{service.http}", timeout=SECONDS) as client:
        for path in (*PATHS, "/static/page.css", "/events"):
            unknown = [client.get(path), client.get(path, headers=basic("unknown"))]
            malformed = client.get(path, headers={"authorization": "Basic !"})
            wrong = client.get(path, headers=basic("user"))

            for response in (*unknown, malformed):
                assert response.status_code == 401
                assert response.headers["www-authenticate"] == 'Basic realm="understudy", charset="UTF-8"'
            assert wrong.status_code == 403
            assert "is not in the group observe" in Page(wrong.text).text
        bearer = client.get("/", headers={"authorization": f"Bearer {token_of('viewer')}"})
        rest = client.get("/v2", headers=basic("client"))

    assert bearer.status_code == 200
    assert rest.status_code == 401
    assert rest.headers["www-authenticate"].startswith("Bearer")


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/checkpoints/7", 404, "there is no checkpoint of step 7"),
        ("/checkpoints/<b>", 400, "give a number from 0 up"),
        ("/?before=9999999999999999999999", 400, "give a number from 0 up"),
        ("/checkpoints/7/events", 404, "there is no checkpoint of step 7"),
        ("/static/page.py", 404, "the page has no file"),
    ],
)
def test_a_request_that_cannot_be_answered_gets_a_page_that_says_why(
    browser: httpx.Client, path: str, status: int, words: str
) -> None:
    response = browser.get(path)

    assert response.status_code == status
    assert words in Page(response.text).text
    assert "<b>" not in response.text


def test_the_checkpoints_before_a_step_can_be_listed(browser: httpx.Client) -> None:
    table = browser.get(f"/?before={STEPS[-1]}").text.partition('id="checkpoints"')[2]

    assert re.findall(rf'href="({ROOT}/checkpoints/\d+)"', table) == [f"{ROOT}/checkpoints/{STEPS[0]}"]


def stream_of(page: httpx.Response) -> str:
    """Return the path of the events of a page."""
    (path,) = re.findall(r'sse-connect="([^"]*)"', page.text)
    return html.unescape(path).removeprefix(ROOT)


def news(response: httpx.Response) -> Iterator[tuple[str, str]]:
    """Yield the name and the data of each event, and at last of each message its id as the event ``id``."""
    name, data = "", ""
    for line in response.iter_lines():
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            data += f"{value}\n"
        elif field == "id":
            yield "id", value
        elif not line and name:
            yield name, data
            name, data = "", ""


@pytest.mark.parametrize("path", ["/", f"/checkpoints/{STEPS[0]}"])
def test_an_open_page_gets_what_has_changed_and_only_that_when_it_comes_back(
    service: RunningService, path: str
) -> None:
    client = service.client(token=token_of("client"))
    part, words = ("state", "An operator pinned it") if path == "/" else ("life", "serving")
    with httpx.Client(base_url=f"http://{service.http}", headers=basic("operator"), timeout=SECONDS) as operator:
        stream = stream_of(operator.get(path))
        with operator.stream("GET", stream) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            assert response.headers["cache-control"] == "no-store"
            client.promote(STEPS[0])
            events = news(response)
            parts: dict[str, str] = {}
            seen = ""
            while words not in parts.get(part, ""):
                name, content = next(events)
                parts[name] = content
            while not seen:
                name, seen = next(events)
                seen = seen if name == "id" else ""
        client.unpin()
        with operator.stream("GET", stream, headers={"last-event-id": seen}) as response:
            came_back = next((content for name, content in news(response) if name == part), "")

    assert f"{ROOT}/acts/" in parts[part]
    assert path != "/" or "An operator pinned it" not in came_back
    assert "curves" not in parts or "<svg" in parts["curves"]


def test_an_open_page_is_offered_only_what_its_caller_may_do(service: RunningService, browser: httpx.Client) -> None:
    client = service.client(token=token_of("client"))
    with browser.stream("GET", stream_of(browser.get("/"))) as response:
        client.promote(STEPS[0])
        state = next(content for name, content in news(response) if name == "state" and "pinned it" in content)
        client.unpin()

    assert "/acts/" not in state


def test_pages_that_are_updated_live_are_bounded_and_a_closed_one_gives_its_place_back(
    service: RunningService, browser: httpx.Client
) -> None:
    with ExitStack() as pages:
        opened = [pages.enter_context(browser.stream("GET", "/events")) for _ in range(STREAMS)]
        beyond = browser.get("/events")
        still_loads = browser.get("/")
        next(opened[-1].iter_lines())

    assert [response.status_code for response in opened] == [200] * STREAMS
    assert beyond.status_code == 429
    assert beyond.headers["retry-after"]
    assert f"{STREAMS} pages are open" in Page(beyond.text).text
    assert still_loads.status_code == 200

    def has_room() -> bool:
        with browser.stream("GET", "/events") as response:
            return response.status_code == 200

    until(has_room)
    assert service.answers("/healthz") == 200


def test_answers_are_compressed_for_those_who_take_that_except_what_holds_a_token(
    service: RunningService, browser: httpx.Client
) -> None:
    plain = browser.get("/", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    for path in (*PATHS, "/static/page.css", "/static/htmx.js"):
        response = browser.get(path)
        assert (response.headers["content-encoding"], response.headers["vary"]) == ("gzip", "Accept-Encoding"), path
        assert int(response.headers["content-length"]) < len(response.content) / 2
        assert "x-request-id" in response.headers
    sizes = {}
    for coding in ("identity", "gzip"):
        with browser.stream("GET", "/events", headers={"accept-encoding": coding}) as response:
            assert response.headers.get("content-encoding", "identity") == coding
            assert response.headers["vary"] == "Accept-Encoding"
            assert {name for name, _ in islice(news(response), 8)} >= {"readiness", "state", "curves"}
            sizes[coding] = response.num_bytes_downloaded
    assert sizes["gzip"] < sizes["identity"] / 3
    with httpx.Client(base_url=f"http://{service.http}", headers=basic("operator"), timeout=SECONDS) as operator:
        question = operator.get(f"/acts/pin?step={STEPS[0]}")
    assert 'name="token"' in question.text
    assert "content-encoding" not in question.headers


def test_a_new_score_is_on_an_open_page_soon_after_it_was_recorded(
    service: RunningService, browser: httpx.Client, chief: Chief
) -> None:
    step = REFUSED_STEP + 10
    with browser.stream("GET", stream_of(browser.get("/"))) as response:
        chief.publish_other(step, model(-step))
        row = ""
        for name, content in news(response):
            rows = re.findall(rf'checkpoints/{step}".*?</tr>', content, re.DOTALL) if name == "checkpoints" else []
            row = rows[0] if rows else row
            if "refused" in row:
                break
        seen = time.time()
    assert "refused" in row
    client = service.client(token=token_of("client"))
    (scored,) = (each for each in client.list_evaluations(min_step=step) if each.outcome == "scored")
    assert 0 <= seen - scored.recorded_at.timestamp() <= SOON_SECONDS
