"""What the file of callers may say, and how it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from understudy.service.callers.callers_file import CallersFile, digest_of, hash_text, new_token
from understudy.service.calls.caller import Group, Limits
from understudy.service.service_errors import SettingsError

HASH = hash_text("a")
CALLER = f'[[callers]]\nname = "ada"\ntokens = ["{HASH}"]\n'
ISSUER = '[[issuers]]\nname = "corp"\nissuer = "https://corp"\naudience = "understudy"\n'


def read(tmp_path: Path, text: str) -> CallersFile:
    file = tmp_path / "callers.toml"
    file.write_text(text, encoding="utf-8")
    return CallersFile.read(file)


def test_a_caller_has_its_tokens_certificates_groups_and_limits(tmp_path: Path) -> None:
    content = read(
        tmp_path,
        f"""
        [limits]
        max_requests = 64
        max_mib = 0.5

        [[callers]]
        name = "trainer"
        groups = ["evaluate", "promote"]
        tokens = ["{hash_text("old")}", "{hash_text("new")}"]
        certificates = ["trainer.example.com"]
        limits = {{ max_requests = 8 }}
        """,
    )
    caller = content.tokens[digest_of("old")]
    assert caller is content.tokens[digest_of("new")] is content.certificates["trainer.example.com"]
    assert (caller.name, caller.groups) == ("trainer", frozenset({Group.EVALUATE, Group.PROMOTE}))
    assert caller.limits == Limits(max_requests=8, max_mib=0.5)
    assert caller.limits.max_bytes == 512 * 1024


def test_an_issuer_has_defaults_and_keys_beside_the_file(tmp_path: Path) -> None:
    issuer = read(tmp_path, ISSUER + 'jwks = "keys.json"\n').issuers["https://corp"]
    assert (issuer.jwks, issuer.groups_claim) == (tmp_path / "keys.json", "groups")
    assert issuer.groups == {group.value: {group} for group in Group}
    assert "RS256" in issuer.algorithms


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("= 1", "is not TOML"),
        (f"limits = {'[' * 50_000}", "is not TOML: it is nested too deeply"),
        (f"limits = {'9' * 5000}", "is not TOML: Exceeds the limit"),
        ("[caller]", "unknown key 'caller'"),
        ("callers = 1", "callers is no list of tables"),
        ('[[callers]]\ntokens = ["x"]', "'a caller' has no name"),
        ('[[callers]]\nname = "ada"', "has neither tokens nor certificates"),
        (CALLER + 'group = ["predict"]', "'ada' has the unknown key 'group'"),
        (
            CALLER + 'groups = ["admin"]',
            "'ada' has the group 'admin'; there are predict, evaluate, promote, observe, follow",
        ),
        (CALLER + 'groups = "predict"', "groups of 'ada' is no list of texts"),
        (CALLER + "limits = { max_requests = 0 }", "max_requests of 'ada' is 0; give a whole number above 0"),
        (CALLER + "limits = { max_requests = 1.5 }", "give a whole number"),
        (CALLER + "limits = { max_mib = true }", "max_mib of 'ada' is True"),
        (CALLER + "limits = { max_gib = 1 }", "unknown key 'max_gib'"),
        (CALLER + CALLER, "the name 'ada' is there twice"),
        (CALLER + CALLER.replace("ada", "bob"), "the token of 'bob' is there twice"),
        ('[[callers]]\nname = "ada"\ntokens = ["secret"]', "a token is not 'sha256:'"),
        (ISSUER, "'corp' has no jwks"),
        (ISSUER + 'jwks = "http://corp/keys"', "give a file, or an https URL"),
        (ISSUER + 'jwks = "https://[::1"', "jwks of 'corp' is https://[::1; give a file, or an https URL"),
        (ISSUER + 'jwks = "k"\nalgorithms = ["HS256"]', "has the algorithm 'HS256'; there are RS256"),
        (ISSUER + 'jwks = "k"\nalgorithms = ["none"]', "has the algorithm 'none'"),
        (ISSUER + 'jwks = "k"\ngroups = { ml = ["admin"] }', "'corp' has the group 'admin'"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises(SettingsError) as refused:
        read(tmp_path, text)
    assert str(refused.value).startswith(f"--callers {tmp_path / 'callers.toml'}")
    assert error in str(refused.value)
    assert "secret" not in str(refused.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        CallersFile.read(tmp_path / "missing.toml")


def test_tokens_differ_and_have_256_random_bits() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert {len(token) for token in tokens} == {len("understudy_") + 43}
