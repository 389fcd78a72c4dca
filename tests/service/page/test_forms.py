from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.service.calls.status import PermissionDeniedError
from understudy.service.page.forms import VALID_SECONDS, FormTokens, fields_of

FORM = "application/x-www-form-urlencoded"
FIELDS = {"step": "10", "serving": "20"}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_token_is_valid_for_an_hour_and_for_the_form_that_it_was_issued_for() -> None:
    clock = Clock()
    tokens = FormTokens(clock)
    token = tokens.issue("someone", "pin", FIELDS)
    tokens.check(token, "someone", "pin", dict(reversed(FIELDS.items())))

    for caller, act, fields in (
        ("other", "pin", FIELDS),
        ("someone", "unpin", FIELDS),
        ("someone", "pin", {**FIELDS, "step": "11"}),
        ("someone", "pin", {}),
    ):
        with pytest.raises(PermissionDeniedError):
            tokens.check(token, caller, act, fields)
    with pytest.raises(PermissionDeniedError):
        FormTokens(clock).check(token, "someone", "pin", FIELDS)
    clock.now += VALID_SECONDS + 1
    with pytest.raises(PermissionDeniedError):
        tokens.check(token, "someone", "pin", FIELDS)


@given(st.text(max_size=100))
def test_no_other_text_is_a_token(text: str) -> None:
    with pytest.raises(PermissionDeniedError):
        FormTokens(Clock()).check(text, "", "pin", {})


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("application/json", b"{}"),
        ("", b"a=1"),
        (FORM, b"a=1&a=2"),
        (FORM, b"&&"),
        (FORM, b"a"),
        (FORM, b"\xff=1"),
        (FORM, b"&".join(b"%d=1" % number for number in range(20))),
    ],
)
def test_what_is_no_form_is_refused(content_type: str, body: bytes) -> None:
    with pytest.raises(InvalidInputError):
        fields_of(content_type, body)


def test_a_form_is_read() -> None:
    assert fields_of(f"{FORM}; charset=UTF-8", b"a=1&b=%3Cx%3E+y&c=") == {"a": "1", "b": "<x> y", "c": ""}
