"""Malicious HDF5: files that link elsewhere, expand, or name code."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import h5py
import numpy as np

from soak.malicious.archives import honest_members
from soak.malicious.harms import Json, harm, write_honest
from soak.malicious.keras_files import function_config, lambda_code
from understudy.checkpoints.kinds import ModelKind

Spoil = Callable[[h5py.File, Path], None]


def _external_link(file: h5py.File, marker: Path) -> None:
    other = marker.with_suffix(".h5")
    with h5py.File(other, "w") as target:
        target["secret"] = np.ones(3)
    file["elsewhere"] = h5py.ExternalLink(str(other), "secret")


def _soft_link(file: h5py.File, marker: Path) -> None:
    del marker
    file["elsewhere"] = h5py.SoftLink("/missing")


def _external_storage(file: h5py.File, marker: Path) -> None:
    del marker
    file.create_dataset("elsewhere", (16,), "u1", external=[("/etc/passwd", 0, 16)])


def _virtual(file: h5py.File, marker: Path) -> None:
    other = marker.with_suffix(".h5")
    with h5py.File(other, "w") as target:
        target["secret"] = np.ones(3)
    layout = h5py.VirtualLayout((3,), "f8")
    layout[:] = h5py.VirtualSource(str(other), "secret", (3,))
    file.create_virtual_dataset("elsewhere", layout)


def _shape_bomb(file: h5py.File, marker: Path) -> None:
    del marker
    file.create_dataset("large", (2**40,), "f4", chunks=(2**10,), fillvalue=0)


def _contiguous_bomb(file: h5py.File, marker: Path) -> None:
    del marker
    space = h5py.h5s.create_simple((2**36,))
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_alloc_time(h5py.h5d.ALLOC_TIME_LATE)
    h5py.h5d.create(file.id, b"large", h5py.h5t.IEEE_F32LE, space, creation)


def _deflate_bomb(file: h5py.File, marker: Path) -> None:
    del marker
    file.create_dataset("large", (300, 2**20), "u1", chunks=(1, 2**20), compression="gzip", compression_opts=1)[:] = 0


def _large_attribute(file: h5py.File, marker: Path) -> None:
    """Texts that share what is stored: each of them is the same megabyte."""
    del marker
    texts = file.create_dataset("texts", (400,), h5py.string_dtype())
    texts[0] = "x" * 2**20
    name = file.filename
    offset = texts.id.get_offset()
    file.flush()
    file.close()
    with Path(name).open("r+b") as raw:
        raw.seek(offset)
        reference = raw.read(16)
        raw.seek(offset)
        raw.write(reference * 400)


_SPOILS: Mapping[str, tuple[str, Spoil]] = {
    "a link to another file": ("link to another file", _external_link),
    "a soft link": ("link that Keras never writes", _soft_link),
    "a dataset stored in another file": ("stored in other files", _external_storage),
    "a dataset put together from others": ("stored in other files", _virtual),
    "a shape of 4 TiB": ("would take it to", _shape_bomb),
    "a shape of 256 GiB without chunks": ("would take it to", _contiguous_bomb),
    "300 MiB of compressed zeros": ("would take it to", _deflate_bomb),
    "texts that share a megabyte": ("would take it to", _large_attribute),
}


def _spoil_file(spoil: Spoil, path: Path, marker: Path) -> None:
    file = h5py.File(path, "r+")
    try:
        spoil(file, marker)
    finally:
        file.close()


def _register_spoil(name: str, refusal: str, spoil: Spoil) -> None:
    @harm(f"{name}, in .weights.h5", ModelKind.WEIGHTS, refusal)
    def _(folder: Path, marker: Path) -> None:
        write_honest(folder / "model.weights.h5")
        _spoil_file(spoil, folder / "model.weights.h5", marker)

    @harm(f"{name}, in .h5", ModelKind.HDF5, refusal)
    def _(folder: Path, marker: Path) -> None:
        write_honest(folder / "model.h5")
        _spoil_file(spoil, folder / "model.h5", marker)

    @harm(f"{name}, in .keras", ModelKind.KERAS, refusal)
    def _(folder: Path, marker: Path) -> None:
        members = honest_members(folder)
        weights = folder / "spoilt.h5"
        weights.write_bytes(members["model.weights.h5"])
        _spoil_file(spoil, weights, marker)
        with zipfile.ZipFile(folder / "model.keras", "w") as archive:
            for member, content in {**members, "model.weights.h5": weights.read_bytes()}.items():
                archive.writestr(member, content)
        weights.unlink()


for _name, (_refusal, _spoil) in _SPOILS.items():
    _register_spoil(_name, _refusal, _spoil)


def _rewrite_model_config(path: Path, change: Callable[[Json], None]) -> None:
    with h5py.File(path, "r+") as file:
        config = json.loads(file.attrs["model_config"])
        change(config)
        file.attrs["model_config"] = json.dumps(config)


@harm("a Lambda layer in .h5 (CVE-2025-9905)", ModelKind.HDF5, "Lambda|lambda")
def _(folder: Path, marker: Path) -> None:
    def change(config: Json) -> None:
        layer = config["config"]["layers"][1]
        function = [lambda_code(marker), None, None]
        layer.update({"class_name": "Lambda", "config": {"name": "y", "function": function, "function_type": "lambda"}})
        layer.pop("module", None)

    write_honest(folder / "model.h5")
    _rewrite_model_config(folder / "model.h5", change)


@harm("a function as a layer in .h5", ModelKind.HDF5, "deserialize")
def _(folder: Path, marker: Path) -> None:
    del marker

    def change(config: Json) -> None:
        layer = config["config"]["layers"][1]
        layer.update(
            {"class_name": "deserialize", "config": {"config": function_config("keras.config", "set_epsilon")}}
        )
        layer.pop("module", None)

    write_honest(folder / "model.h5")
    _rewrite_model_config(folder / "model.h5", change)


@harm("set_epsilon as a loss in .h5", ModelKind.HDF5, "set_epsilon")
def _(folder: Path, marker: Path) -> None:
    del marker
    write_honest(folder / "model.h5")
    with h5py.File(folder / "model.h5", "r+") as file:
        training = json.loads(file.attrs["training_config"])
        training["loss"] = function_config("keras.config", "set_epsilon")
        file.attrs["training_config"] = json.dumps(training)
