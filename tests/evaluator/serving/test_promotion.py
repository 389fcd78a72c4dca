from __future__ import annotations

from pathlib import Path

import pytest

from understudy.evaluator.evaluator_errors import ConfigurationError
from understudy.evaluator.serving.promotion import PIN_FILE, PinFile


def test_a_pin_is_read_back_and_taken_back(tmp_path: Path) -> None:
    assert PinFile(tmp_path).read() is None
    PinFile(tmp_path).write(7)
    assert PinFile(tmp_path).read() == 7
    PinFile(tmp_path).write(None)
    assert PinFile(tmp_path).read() is None


@pytest.mark.parametrize("content", ["", "[]", '{"step": "x"}', "{}"])
def test_a_damaged_pin_is_refused_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / PIN_FILE).write_text(content)

    with pytest.raises(ConfigurationError, match=r"pin\.json is damaged"):
        PinFile(tmp_path).read()
