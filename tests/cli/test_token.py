"""The command that makes a token and the caller's entry."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from understudy.cli.main import main
from understudy.service.callers.callers_file import CallersFile, digest_of
from understudy.service.calls.caller import Group


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def token(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["token", *arguments])


def test_the_entry_is_that_of_the_token_and_the_token_stays_private(tmp_path: Path) -> None:
    made = token("trainer", "--group", "evaluate", "--group", "promote")
    file = tmp_path / "trainer.token"
    secret = file.read_text(encoding="ascii").strip()
    callers = tmp_path / "callers.toml"
    callers.write_text(made.stdout, encoding="utf-8")

    caller = CallersFile.read(callers).tokens[digest_of(secret)]

    assert (caller.name, caller.groups) == ("trainer", frozenset({Group.EVALUATE, Group.PROMOTE}))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert secret not in made.output


def test_a_token_that_exists_is_kept(tmp_path: Path) -> None:
    (tmp_path / "trainer.token").write_text("old", encoding="ascii")
    refused = token("trainer")
    assert refused.exit_code == 1
    assert "trainer.token exists; give another one with --output" in refused.stderr
    assert token("trainer", "--output", "new.token").exit_code == 0
    assert (tmp_path / "trainer.token").read_text(encoding="ascii") == "old"


def test_what_cannot_be_is_refused() -> None:
    assert "without quotes" in token('a"b').stderr
    assert "cannot be written" in token("a", "--output", "missing/a.token").stderr
    assert (
        "'admin' is not one of 'predict', 'evaluate', 'promote', 'observe', 'follow'"
        in token("a", "--group", "admin").stderr
    )
