"""Which line of a traceback an error names."""

from __future__ import annotations

import sysconfig

import pytest

from understudy.experiments.users_code import place_of

SCRIPT = ("/home/me/train.py", 10)
OURS = (place_of.__code__.co_filename, 71)
IN_A_CLONE = ("/home/me/understudy/mine.py", 3)
LIBRARY = (f"{sysconfig.get_path('purelib')}/keras/src/losses/loss.py", 63)
PYTHON = (f"{sysconfig.get_path('stdlib')}/threading.py", 1)
TEXT = ("<string>", 1)
LOSS = ("/home/me/losses.py", 4)


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([], ""),
        ([SCRIPT, OURS, LIBRARY], ""),
        ([SCRIPT, OURS, LIBRARY, LOSS, LIBRARY, PYTHON, TEXT], " (/home/me/losses.py, line 4)"),
        ([OURS, SCRIPT, LOSS], " (/home/me/losses.py, line 4)"),
        ([OURS, IN_A_CLONE], " (/home/me/understudy/mine.py, line 3)"),
        ([LIBRARY, LOSS], " (/home/me/losses.py, line 4)"),
    ],
)
def test_it_is_the_last_one_that_this_project_or_a_library_called(frames: list[tuple[str, int]], expected: str) -> None:
    assert place_of(frames) == expected
