"""Looking into a copy of a ``.keras`` file."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from understudy.checkpoints import DamagedCheckpointError
from understudy.checkpoints.formats import FORMATS

from .conftest import WriteKeras

inspect = FORMATS[0].inspect


def test_the_optimizers_count_is_read(tmp_path: Path, write_keras: WriteKeras) -> None:
    assert inspect(write_keras(tmp_path / "a.keras", iterations=314)).iterations == 314


@pytest.mark.parametrize("iterations", [None, 0])
def test_an_optimizer_that_took_no_step_has_no_count(
    tmp_path: Path,
    write_keras: WriteKeras,
    iterations: int | None,
) -> None:
    assert inspect(write_keras(tmp_path / "a.keras", iterations=iterations)).iterations is None


def test_a_model_saved_twice_has_one_digest_and_another_model_another(tmp_path: Path, write_keras: WriteKeras) -> None:
    monday = inspect(write_keras(tmp_path / "a.keras", date="Monday"))
    tuesday = inspect(write_keras(tmp_path / "b.keras", date="Tuesday"))
    other = inspect(write_keras(tmp_path / "c.keras", weight=2.0))
    assert monday.digest == tuesday.digest != other.digest


def test_nothing_is_left_beside_the_file(tmp_path: Path, write_keras: WriteKeras) -> None:
    path = write_keras(tmp_path / "a.keras")
    inspect(path)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("missing", ["config.json", "model.weights.h5"])
def test_a_zip_without_a_part_is_damaged(tmp_path: Path, write_keras: WriteKeras, missing: str) -> None:
    whole, part = write_keras(tmp_path / "whole.keras"), tmp_path / "part.keras"
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(part, "w") as target:
        for name in source.namelist():
            if name != missing:
                target.writestr(name, source.read(name))
    with pytest.raises(DamagedCheckpointError, match=missing):
        inspect(part)


def test_weights_that_are_no_hdf5_are_damage(tmp_path: Path) -> None:
    path = tmp_path / "a.keras"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", "{}")
        archive.writestr("model.weights.h5", "not HDF5")
    with pytest.raises(DamagedCheckpointError, match=r"model\.weights\.h5 cannot be read"):
        inspect(path)


@given(st.data())
@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # Every example writes its own file.
)
def test_a_file_cut_off_anywhere_is_damaged(tmp_path: Path, write_keras: WriteKeras, data: st.DataObject) -> None:
    path = write_keras(tmp_path / "a.keras", iterations=3)
    with path.open("r+b") as file:
        file.truncate(data.draw(st.integers(0, path.stat().st_size - 1)))
    with pytest.raises(DamagedCheckpointError, match="not a whole"):
        inspect(path)


@given(st.data())
@settings(
    max_examples=80,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # Every example writes its own file.
)
def test_a_flipped_bit_is_damage_or_changes_nothing(
    tmp_path: Path,
    write_keras: WriteKeras,
    data: st.DataObject,
) -> None:
    path = write_keras(tmp_path / "a.keras", iterations=3)
    expected = inspect(path)
    content = bytearray(path.read_bytes())
    bit = data.draw(st.integers(0, len(content) * 8 - 1))
    content[bit // 8] ^= 1 << (bit % 8)
    path.write_bytes(content)
    try:
        found = inspect(path)
    except DamagedCheckpointError:
        return
    assert found == expected  # The bit was in a date or an attribute of the zip's directory.
