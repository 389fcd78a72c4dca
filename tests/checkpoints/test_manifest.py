"""The manifest says what was written, or that it is damaged."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.checkpoints import (
    DamagedCheckpointError,
    FileEntry,
    Manifest,
    ModelKind,
    Signature,
    UnsupportedFormatError,
)
from understudy.checkpoints.atomic import encode_json
from understudy.checkpoints.manifest import decode_manifest, encode_manifest

_ORIGIN = Path("manifest.json")
_MODEL = FileEntry(path="model.keras", size_bytes=3, sha256="ab" * 32)
_MANIFEST = Manifest(
    step=7,
    epoch=1,
    created_at=1.5,
    final=True,
    digest="cd" * 32,
    files=(_MODEL,),
    metrics={"loss": 0.25},
    versions={"keras": "3"},
)
_CONTENT = encode_manifest(_MANIFEST)


def _with(**fields: object) -> bytes:
    """Return a manifest with other fields and the right checksum."""
    value = {**_MANIFEST.as_json(), **fields}
    return encode_json({**value, "checksum": hashlib.sha256(encode_json(value)).hexdigest()})


@given(
    step=st.integers(0, 2**53),
    epoch=st.none() | st.integers(0, 2**31),
    created_at=st.floats(0, 1e11),
    final=st.booleans(),
    metrics=st.dictionaries(st.text(), st.floats(allow_nan=False)),
)
def test_a_manifest_comes_back_as_it_was(
    step: int,
    epoch: int | None,
    created_at: float,
    final: bool,  # noqa: FBT001 - drawn by hypothesis
    metrics: dict[str, float],
) -> None:
    manifest = Manifest(
        step=step,
        epoch=epoch,
        created_at=created_at,
        final=final,
        digest="d",
        files=(_MODEL,),
        metrics=metrics,
    )
    assert decode_manifest(encode_manifest(manifest), origin=_ORIGIN) == manifest


def test_a_signature_comes_back_as_it_was(signature: Signature) -> None:
    manifest = dataclasses.replace(_MANIFEST, signature=signature)
    assert decode_manifest(encode_manifest(manifest), origin=_ORIGIN) == manifest


@given(st.integers(0, len(_CONTENT) * 8 - 1))
def test_a_flipped_bit_is_found(bit: int) -> None:
    content = bytearray(_CONTENT)
    content[bit // 8] ^= 1 << (bit % 8)
    with pytest.raises((DamagedCheckpointError, UnsupportedFormatError)):
        decode_manifest(bytes(content), origin=_ORIGIN)


@given(st.integers(0, len(_CONTENT) - 2))
def test_a_truncated_manifest_is_found(length: int) -> None:
    with pytest.raises(DamagedCheckpointError, match="not a manifest"):
        decode_manifest(_CONTENT[:length], origin=_ORIGIN)


def test_another_format_version_is_named() -> None:
    with pytest.raises(UnsupportedFormatError, match="version 2, this program reads 1"):
        decode_manifest(_with(format_version=2), origin=_ORIGIN)


@pytest.mark.parametrize("path", ["../model.keras", "/etc/passwd", ""])
def test_a_path_out_of_the_checkpoint_is_refused(path: str) -> None:
    files = [*_MANIFEST.as_json()["files"], {"path": path, "size_bytes": 1, "sha256": ""}]
    with pytest.raises(DamagedCheckpointError, match="leads out of the checkpoint"):
        decode_manifest(_with(files=files), origin=_ORIGIN)


@pytest.mark.parametrize(
    "fields",
    [
        {"digest": "half \ud800"},
        {"run": "half \udfff"},
        {"metrics": {"half \ud800": 1.0}},
        {"files": [*_MANIFEST.as_json()["files"], {"path": "half \ud800", "size_bytes": 0, "sha256": ""}]},
        {"files": [*_MANIFEST.as_json()["files"], {"path": "null \0", "size_bytes": 0, "sha256": ""}]},
        *({"created_at": time} for time in (-1.0, 1e300, "nan", "inf")),
    ],
    ids=str,
)
def test_what_no_text_no_path_and_no_time_can_hold_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(DamagedCheckpointError, match="is not a manifest"):
        decode_manifest(_with(**fields), origin=_ORIGIN)


def test_two_halves_of_a_character_are_text() -> None:
    assert decode_manifest(_with(run="\N{GRINNING FACE}"), origin=_ORIGIN).run == "\N{GRINNING FACE}"


def test_a_negative_size_that_would_hide_a_large_one_is_refused() -> None:
    files = [*_MANIFEST.as_json()["files"], {"path": "resume/state", "size_bytes": -(2**40), "sha256": ""}]
    with pytest.raises(DamagedCheckpointError, match=r"the size of 'resume/state' is -1099511627776 bytes"):
        decode_manifest(_with(files=files), origin=_ORIGIN)


def test_a_manifest_without_a_model_is_refused() -> None:
    with pytest.raises(DamagedCheckpointError, match=r"lists no model\.keras"):
        decode_manifest(_with(files=[]), origin=_ORIGIN)


@pytest.mark.parametrize("kind", list(ModelKind))
def test_a_manifest_says_how_its_model_is_stored(kind: ModelKind) -> None:
    file = f"{kind.file_name}.index" if kind is ModelKind.TF_CHECKPOINT else kind.file_name
    content = _with(kind=kind.value, files=[{"path": file, "size_bytes": 1, "sha256": ""}])
    assert decode_manifest(content, origin=_ORIGIN).kind is kind


def test_a_manifest_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(DamagedCheckpointError, match="'pickle' is not a valid ModelKind"):
        decode_manifest(_with(kind="pickle"), origin=_ORIGIN)


@pytest.mark.parametrize("content", [b"[]", b"null", b"{", b"\xff", json.dumps({"format_version": 1}).encode()])
def test_what_is_no_manifest_is_refused(content: bytes) -> None:
    with pytest.raises(DamagedCheckpointError):
        decode_manifest(content, origin=_ORIGIN)


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.just(10**400)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(field=st.sampled_from(sorted(_MANIFEST.as_json())), value=_JSON)
def test_whatever_a_field_holds_the_manifest_is_read_or_damaged(field: str, value: object) -> None:
    with contextlib.suppress(DamagedCheckpointError, UnsupportedFormatError):
        assert isinstance(decode_manifest(_with(**{field: value}), origin=_ORIGIN), Manifest)


def test_a_manifest_nested_without_end_is_damaged() -> None:
    with pytest.raises(DamagedCheckpointError, match="not a manifest"):
        decode_manifest(b"[" * 200_000, origin=_ORIGIN)
