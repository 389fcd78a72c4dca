"""What people see on a terminal, and what a program is given instead."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from understudy.cli.command_errors import CommandError
from understudy.cli.examples import shown
from understudy.cli.output import (
    counted,
    csv_cell,
    formatted_metrics,
    formatted_slice,
    notes_of,
    print_json,
    print_slices,
    print_table,
    say,
)
from understudy.cli.report_page import summary_of
from understudy.clients import Flips, Interval, SliceScore

ROWS = [("120", "AVAILABLE"), ("80", "model.keras: expected [/red] bytes")]


def test_what_is_undefined_for_one_reason_is_one_note_whatever_the_order() -> None:
    undefined = {"recall": "no positive", "auc": "no positive", "wacc": "no weight", "loss": "no weight"}
    scored = SimpleNamespace(notes=("first",), undefined=undefined)

    expected = ("first", "loss, wacc are undefined: no weight", "auc, recall are undefined: no positive")
    assert notes_of(scored) == expected


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


def test_a_narrow_terminal_cuts_nothing_off(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "80")
    names = ("accuracy", "auc", "precision", "recall", "f1")
    metrics = dict.fromkeys(names, 0.123456)
    intervals = dict.fromkeys(names, Interval(low=0.1111, high=0.2222))
    parts = [
        SliceScore(name=f"country={'x' * 40},label={label}", examples=7, metrics=metrics, intervals=intervals, notes=())
        for label in (0, 1)
    ]

    print_table(("slice", "loss"), [(part.name, "0.5") for part in parts])
    print_slices(parts)

    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert not any("…" in line for line in lines)
    assert sum("0.123456 [0.1111, 0.2222]" in line for line in lines) == len(parts) * len(names)


def test_columns_line_up_below_wide_characters(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("slice", "loss"), [("city=\u6771\u4eac", "0.5"), ("city=Oslo", "0.25")])

    assert capsys.readouterr().out.splitlines() == ["slice      loss", "city=\u6771\u4eac  0.5", "city=Oslo  0.25"]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_server_controls_no_terminal_and_begins_no_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    monkeypatch.setenv("TERM", "dumb")
    hostile = "a\x1b]0;title\x07\x9b2J\r\u202e\ud800\nnote: all is well"
    notes = SliceScore(name=hostile, examples=1, metrics={"loss": 0.5}, notes=(hostile,), intervals={}, undefined={})

    print_table((hostile,), [(hostile,)], title=hostile)
    print_slices([notes])
    say(hostile)
    CommandError(hostile).show()

    written = capsys.readouterr()
    shown = written.out + written.err
    assert all(each.isprintable() for each in shown.replace("\n", ""))
    assert not any(line.startswith("note: all is well") for line in shown.splitlines())


@pytest.mark.parametrize("text", ["=1+1", "+1+1", "-1+1", "@SUM(A1)", "\t=1", "\r=1"])
def test_a_text_in_a_csv_file_is_no_formula(text: str) -> None:
    assert csv_cell(text) == f"'{text}"


def test_all_else_in_a_csv_file_stays_what_it_is() -> None:
    assert [csv_cell(cell) for cell in ("-1.5", "+inf", -1.5, None, "a=b", "")] == [
        "-1.5",
        "+inf",
        -1.5,
        None,
        "a=b",
        "",
    ]


def test_json_says_in_words_what_it_has_no_numbers_for(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"values": [float("inf"), -float("inf"), float("nan"), 1.5], "text": b"\xff"})

    expected = '{"values": ["Infinity", "-Infinity", "NaN", 1.5], "text": "\\\\xff"}\n'
    assert capsys.readouterr().out == expected


def test_an_example_without_labels_has_none() -> None:
    assert [shown(cell) for cell in ([], [0, 2], [0.5], 1.25)] == ["none", "0 2", "0.5", "1.25"]


def test_one_example_is_no_plural() -> None:
    flips = Flips(newly_wrong=1, newly_right=3, both_right=5, both_wrong=1, p_value=0.625)
    assert summary_of(flips).startswith("1 example is newly wrong and 3 newly right; so uneven")
    assert [counted(number) for number in (0, 1, 2)] == ["0 examples", "1 example", "2 examples"]


def test_the_loss_comes_first() -> None:
    scored = SliceScore(name="", examples=1, metrics={"accuracy": 0.5, "loss": 0.123456789}, intervals={}, notes=())
    assert formatted_metrics(scored) == "loss 0.123457  accuracy 0.5"


def test_what_is_undefined_is_shown_in_the_place_of_a_value_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    scored = SliceScore(name="a=1", examples=3, metrics={"loss": 0.5}, intervals={}, notes=(), undefined={"auc": "why"})
    nothing = SliceScore(name="a=2", examples=1, metrics={}, intervals={}, notes=("fewer than 2 examples",))

    assert formatted_slice(scored) == "loss 0.5  auc undefined; auc is undefined: why"
    print_slices([scored, nothing])
    assert capsys.readouterr().out.splitlines() == [
        "slice  examples  loss  auc",
        "a=1    3         0.5   undefined",
        "a=2    1         -     -",
        "note: a=1: auc is undefined: why",
    ]
