"""The README and the documentation work as they stand there."""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit.doc_examples import GRPC_PORT, HTTP_PORT, Example, Session, examples_of
from testkit.front_ends import missing_for_envoy
from testkit.ports import free_ports
from understudy.clients import AsyncClient, Client

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if "decisions" not in path.parts)
WITHOUT_EXAMPLES = {"architecture.md", "glossary.md", "scale.md"}
"""Pages that explain the code, the words and the limits."""

MOST_README_LINES = 150

TRAINING = Example("sh", "", "understudy train digits --run-dir runs/digits --steps 40 --checkpoint-every 20\n")
"""How most pages begin. These pages share one training."""

PREPARATION = (
    TRAINING,
    Example("sh", "In the background", "understudy serve --run-dir runs/digits --experiment digits\n"),
)
"""How many pages begin. These pages share one service, too."""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def ports() -> dict[int, int]:
    """Return a free port for each documented one."""
    documented = (GRPC_PORT, HTTP_PORT, 4318, 12345, 12346)
    return dict(zip(documented, free_ports(len(documented)), strict=True))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which `TRAINING` has run."""
    folder = tmp_path_factory.mktemp("trained")
    with Session(folder, ports()) as session:
        session.run(TRAINING)
    return folder


@pytest.fixture(scope="module")
def shared_session(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """Give a session in which the blocks of `PREPARATION` have run, for the pages that begin with them."""
    folder = tmp_path_factory.mktemp("shared")
    shutil.copytree(trained, folder, dirs_exist_ok=True)
    with Session(folder, ports()) as session:
        for example in PREPARATION[1:]:
            session.run(example)
        yield session


def is_prepared(page: Path) -> bool:
    return tuple(example for example in examples_of(page) if not example.needs)[: len(PREPARATION)] == PREPARATION


@pytest.mark.long
@pytest.mark.parametrize("page", [*filter(is_prepared, PAGES)], ids=name_of)
@pytest.mark.timeout(600)
def test_every_example_of_a_page_runs_beside_the_digits_service(page: Path, shared_session: Session) -> None:
    for example in examples_of(page):
        if example not in PREPARATION:
            shared_session.run(example)


@pytest.mark.long
@pytest.mark.parametrize("page", [README, *itertools.filterfalse(is_prepared, PAGES)], ids=name_of)
@pytest.mark.timeout(600)
def test_every_example_of_a_page_runs(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    needs_envoy = any("--frontend envoy" in example.code for example in examples_of(page) if example.is_run)
    if needs_envoy and (missing := missing_for_envoy()):
        pytest.skip(missing)
    with Session(tmp_path, ports()) as session:
        for example in examples_of(page):
            if example == TRAINING:
                shutil.copytree(request.getfixturevalue("trained"), tmp_path, dirs_exist_ok=True)
            else:
                session.run(example)


@pytest.mark.parametrize("page", [README, *PAGES], ids=name_of)
def test_a_page_has_an_example_that_runs(page: Path) -> None:
    assert page.name in WITHOUT_EXAMPLES or any(example.is_run for example in examples_of(page))


@pytest.mark.parametrize("page", [README, *PAGES], ids=name_of)
def test_the_languages_of_a_page_are_known(page: Path) -> None:
    languages = {example.language for example in examples_of(page)}
    assert languages <= {"python", "sh", "toml", "text", "protobuf"}
    assert page.read_text(encoding="utf-8").count("\n```") == 2 * len(examples_of(page)), "a fence that no test reads"


@pytest.mark.parametrize("page", [README, *PAGES], ids=name_of)
def test_every_file_that_a_page_links_to_exists(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)#\s]+)\)", page.read_text(encoding="utf-8")) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= MOST_README_LINES


def test_the_asyncio_client_has_the_methods_that_the_pages_call() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in (README, *PAGES))
    methods = set(re.findall(r"\bclient\.(predict\w*|evaluate\w*|compare|watch_\w+|status|metadata|promote)\(", text))
    assert methods >= {"predict", "evaluate", "compare", "watch_evaluations"}
    for method in methods:
        assert callable(getattr(Client, method))
        assert callable(getattr(AsyncClient, method))


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [
        page for page in (ROOT / "docs").rglob("*.md") if str(page.relative_to(ROOT / "docs")) not in navigation
    ] == []


def test_an_example_that_fails_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```sh\necho before; false\n```\n", encoding="utf-8")
    (example,) = examples_of(page)
    with Session(tmp_path, ports()) as session, pytest.raises(AssertionError, match="before"):
        session.run(example)


def test_bash_parses_what_cannot_run_here(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text('```sh title="Needs Docker"\ndocker run "unclosed\n```\n', encoding="utf-8")
    (example,) = examples_of(page)
    with Session(tmp_path, ports()) as session, pytest.raises(AssertionError):
        session.run(example)
