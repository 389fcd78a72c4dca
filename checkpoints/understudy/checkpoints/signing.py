"""Signatures of checkpoints: Ed25519, by a key of the trainer, over the exact bytes that name every file with its hash.

A signature file has one line, with an identifier of the key and the signature, both in hexadecimal. That of a published
checkpoint, ``manifest.json.sig``, is of its manifest. `understudy.checkpoints.detached` is about those of other
checkpoints. The identifier only helps to say which key is missing; nothing of a checkpoint is parsed before its
signature was found valid.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from understudy.checkpoints.checkpoint_errors import KeyFileError, UntrustedCheckpointError
from understudy.checkpoints.stable_copy import Stamp

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SIGNATURE_SUFFIX = ".sig"
PUBLIC_SUFFIX = ".pub"

MANIFEST = b"understudy manifest 1\n"
"""The purpose of a manifest's signature. A signature for one purpose is not valid for another."""

_LINE = re.compile(rb"understudy-signature 1 key=([0-9a-f]{16}) ed25519=([0-9a-f]{128})\n")
LINE_BYTES = 181
"""The length of a signature's line."""

_LARGEST_KEY_BYTES = 2**16

_PEM_BLOCK = re.compile(rb"-----BEGIN [^-\r\n]+-----.+?-----END [^-\r\n]+-----", re.DOTALL)

_log = logging.getLogger(__name__)

REQUIRE_SIGNATURE = {
    "help": "Read only checkpoints that are signed with the private key of one of the public keys in these files. The "
    "service reads them again when they change.",
    "metavar": "FILES",
}
"""The metadata of a setting for the keys to accept."""

RUN_NAME = {
    "help": "The name of the run for which checkpoints are signed; by default that of the run folder, or of the folder "
    "of checkpoints.",
    "metavar": "NAME",
}
"""The metadata of a setting for the name that signatures are bound to."""


@dataclass(frozen=True, kw_only=True)
class SigningKey:
    """A private key. Thread-safe."""

    key: Ed25519PrivateKey
    identifier: str

    @classmethod
    def read(cls, file: Path) -> SigningKey:
        """Read a private key in PEM format.

        Raises:
            KeyFileError: The file cannot be read, is no Ed25519 key, or others than its owner may read it.
        """
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        content = _read_key(file, is_private=True)
        try:
            key = load_pem_private_key(content, password=None)
        except Exception as error:
            raise KeyFileError(
                f"{file} is no private key in PEM format without a passphrase: {error}; make one with understudy keygen"
            ) from error
        if not isinstance(key, Ed25519PrivateKey):
            raise KeyFileError(f"{file} is a key of another kind; make an Ed25519 key with understudy keygen")
        return cls(key=key, identifier=_identifier(key.public_key()))

    def sign(self, content: bytes, purpose: bytes) -> bytes:
        """Return the line of a signature."""
        signature = self.key.sign(purpose + content)
        return f"understudy-signature 1 key={self.identifier} ed25519={signature.hex()}\n".encode()


@dataclass(frozen=True, kw_only=True)
class Signer:
    """Signs the checkpoints of one run. The name of the run is part of what is signed. Thread-safe."""

    key: SigningKey
    run: str

    @property
    def accepted(self) -> AcceptedKeys:
        """What accepts the signatures of this signer."""
        return AcceptedKeys(keys={self.key.identifier: self.key.key.public_key()}, run=self.run)


class AcceptedKeys:
    """The public keys whose signatures are accepted, and the run that a checkpoint must be of.

    Thread-safe, but for `refresh`: one thread at a time.

    Args:
        files: Files with one or several public keys each, in PEM format.
        keys: Keys that are accepted as well, by their identifiers.
        run: The name of the run.

    Raises:
        KeyFileError: A file cannot be read, or holds something else than public Ed25519 keys.
    """

    def __init__(
        self, files: Sequence[Path] = (), *, keys: Mapping[str, Ed25519PublicKey] | None = None, run: str
    ) -> None:
        self.run = run
        self._files = files
        self._others = keys or {}
        self._stamps = _stamps(files)
        self._keys = {**self._others, **_read_all(files)}
        self._is_current = True

    @property
    def identifiers(self) -> frozenset[str]:
        """The identifiers of the keys."""
        return frozenset(self._keys)

    @property
    def is_current(self) -> bool:
        """Whether the keys are those of the files; if not, `refresh` could not use what the files hold."""
        return self._is_current

    def refresh(self) -> None:
        """Read the files again if they changed. What cannot be used is logged once, and changes nothing."""
        stamps = _stamps(self._files)
        if stamps == self._stamps:
            return
        try:
            keys = {**self._others, **_read_all(self._files)}
        except KeyFileError as error:
            self._stamps, self._is_current = stamps, False
            _log.error(
                "kept the old keys of signatures, because the new ones cannot be used", extra={"reason": str(error)}
            )
            return
        if _stamps(self._files) != stamps:  # written meanwhile; the next call reads them
            return
        self._stamps, self._is_current, self._keys = stamps, True, keys
        _log.info("the accepted keys of signatures were read again", extra={"keys": ", ".join(keys)})

    def also(self, other: AcceptedKeys) -> AcceptedKeys:
        """Return these keys, and those of another as they are now."""
        return AcceptedKeys(self._files, keys={**self._others, **other._keys}, run=self.run)

    def check(self, content: bytes, line: bytes, purpose: bytes, *, origin: Path) -> None:
        """Check the signature of some content.

        Args:
            content: What was signed.
            line: The line of the signature.
            purpose: What the signature is for.
            origin: What error texts name.

        Raises:
            UntrustedCheckpointError: The line is no signature, its key is not accepted, or it is of another content.
        """
        from cryptography.exceptions import InvalidSignature

        found = _LINE.fullmatch(line)
        if found is None:
            raise UntrustedCheckpointError(f"{origin} has a signature file that is no signature of understudy")
        identifier = found[1].decode()
        key = self._keys.get(identifier)
        if key is None:
            raise UntrustedCheckpointError(
                f"{origin} is signed with the key {identifier}, which is not accepted; if it may be, add its public "
                "key to a file of --require-signature"
            )
        try:
            key.verify(bytes.fromhex(found[2].decode()), purpose + content)
        except InvalidSignature:
            raise UntrustedCheckpointError(
                f"{origin} is not what was signed with the key {identifier}: it was altered, or its signature was"
            ) from None

    def check_run(self, run: str | None, *, origin: Path) -> None:
        """Raise UntrustedCheckpointError if a signed checkpoint is of another run."""
        if run != self.run:
            raise UntrustedCheckpointError(
                f"{origin} is signed for the run {run!r}, accepted is {self.run!r}; if that is the same run, give both "
                "the trainer and the reader the same --run-name"
            )


def run_name(folder: Path) -> str:
    """Return the name of a run whose name is not given: that of its folder."""
    return folder.resolve().name


def accepted_keys(files: Sequence[Path], *, run: str | None, folder: Path) -> AcceptedKeys | None:
    """Return the keys of which one must have signed a checkpoint; None if there are no files.

    Args:
        files: The public keys.
        run: The name of the run; by default that of the folder.
        folder: The run folder, or the folder of checkpoints.

    Raises:
        KeyFileError: A key cannot be read.
    """
    return AcceptedKeys(files, run=run or run_name(folder)) if files else None


def write_key_pair(file: Path) -> str:
    """Write a new private key, which only its owner may read, and beside it the public key; return the identifier.

    Raises:
        KeyFileError: One of the files exists, or cannot be written.
    """
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    for path, content, mode in ((file, private, 0o600), (public_file(file), public, 0o644)):
        try:
            with open(path, "xb", opener=functools.partial(os.open, mode=mode)) as output:
                output.write(content)
        except OSError as error:
            raise KeyFileError(f"{path} cannot be written: {error.strerror}; a key is never overwritten") from error
    return _identifier(key.public_key())


def public_file(file: Path) -> Path:
    """Return where `write_key_pair` writes the public key."""
    return file.with_name(file.name + PUBLIC_SUFFIX)


def _read_all(files: Sequence[Path]) -> dict[str, Ed25519PublicKey]:
    return {_identifier(key): key for file in files for key in _read_public(file)}


def _stamps(files: Sequence[Path]) -> list[Stamp | None]:
    """Return what changes when a file is written, replaced or deleted."""
    return [_stamp(file) for file in files]


def _stamp(file: Path) -> Stamp | None:
    try:
        return Stamp.of(file.stat())
    except OSError:
        return None


def _read_public(file: Path) -> list[Ed25519PublicKey]:
    content = _read_key(file, is_private=False)
    if b"PRIVATE KEY" in content:
        raise KeyFileError(f"{file} is a private key, which belongs to the trainer alone; give its public key")
    blocks = _PEM_BLOCK.findall(content)
    if not blocks or len(blocks) != content.count(b"-----BEGIN"):
        raise KeyFileError(f"{file} is not one public key in PEM format after the other, or the last one is cut off")
    return [_parse_public(file, block) for block in blocks]


def _parse_public(file: Path, block: bytes) -> Ed25519PublicKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key: Any = load_pem_public_key(block)
    except Exception as error:
        raise KeyFileError(f"{file} holds what is no public key in PEM format: {error}") from error
    if not isinstance(key, Ed25519PublicKey):
        raise KeyFileError(f"{file} holds a key of another kind; expected is an Ed25519 key of understudy keygen")
    return key


def _read_key(file: Path, *, is_private: bool) -> bytes:
    try:
        if not stat.S_ISREG(file.stat().st_mode):  # else opening a pipe would wait for its writer
            raise KeyFileError(f"the key {file} is no regular file")
        with file.open("rb") as opened:
            if is_private:
                _check_mode(file, os.fstat(opened.fileno()))
            content = opened.read(_LARGEST_KEY_BYTES + 1)
    except OSError as error:
        raise KeyFileError(f"the key {file} cannot be read: {error.strerror}") from error
    if len(content) > _LARGEST_KEY_BYTES:
        raise KeyFileError(f"{file} has more than {_LARGEST_KEY_BYTES} bytes, too many for a file of keys")
    return content


def _check_mode(file: Path, status: os.stat_result) -> None:
    """Refuse a private key that others may read or change. A mounted secret of another owner is read by its group."""
    forbidden = 0o077 if status.st_uid == os.geteuid() else 0o037
    mode = stat.S_IMODE(status.st_mode)
    if mode & forbidden:
        raise KeyFileError(f"{file} has the permissions {mode:04o}, others may use it; chmod 600 {file}")


def _identifier(key: Ed25519PublicKey) -> str:
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()[:16]
