"""What people see on a terminal, and what a program is given instead."""

from __future__ import annotations

import sys

import pytest

from understudy.cli.output import formatted_metrics, print_json, print_table

ROWS = [("120", "AVAILABLE"), ("80", "model.keras: expected [/red] bytes")]


def test_a_pipe_gets_plain_columns(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("step", "state"), ROWS, title="doubler")

    assert capsys.readouterr().out.splitlines() == [
        "doubler",
        "step  state",
        "120   AVAILABLE",
        "80    model.keras: expected [/red] bytes",
    ]


def test_a_terminal_gets_a_table_with_every_character(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")

    print_table(("step", "state"), ROWS, title="doubler")

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "doubler"
    assert "│ 80   │ model.keras: expected [/red] bytes │" in lines


def test_json_says_in_words_what_it_has_no_numbers_for(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"values": [float("inf"), -float("inf"), float("nan"), 1.5], "text": b"\xff"})

    expected = '{"values": ["Infinity", "-Infinity", "NaN", 1.5], "text": "\\\\xff"}\n'
    assert capsys.readouterr().out == expected


def test_the_loss_comes_first() -> None:
    assert formatted_metrics({"accuracy": 0.5, "loss": 0.123456789}) == "loss 0.123457  accuracy 0.5"
