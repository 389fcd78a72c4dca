"""Signed checkpoints: what is unsigned, altered, of another step, run or key is refused before it is parsed."""

from __future__ import annotations

import os
import random
import shutil
import stat
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from testkit.polling import polled
from understudy.checkpoints import (
    AcceptedKeys,
    CheckpointGoneError,
    CheckpointPublisher,
    DamagedCheckpointError,
    FolderSource,
    KeyFileError,
    RunDir,
    RunSource,
    Signer,
    SigningKey,
    UntrustedCheckpointError,
    open_local_checkpoint,
    sign_checkpoint,
)
from understudy.checkpoints import manifest as manifest_module
from understudy.checkpoints.fs import remove_folder
from understudy.checkpoints.signing import public_file, write_key_pair

from .conftest import WriteKeras

STEP = 7


@dataclass(frozen=True)
class Keys:
    """Two key pairs."""

    own: Path
    other: Path

    def accepted(self, *files: Path, run: str = "run") -> AcceptedKeys:
        return AcceptedKeys([public_file(file) for file in files or (self.own,)], run=run)


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    folder = tmp_path_factory.mktemp("keys")
    pairs = Keys(folder / "own.key", folder / "other.key")
    for file in (pairs.own, pairs.other):
        write_key_pair(file)
    return pairs


def write_keys(file: Path, *pairs: Path) -> Path:
    """Put the public keys of some pairs into one file, as a whole."""
    new = file.with_name("new.pem")
    new.write_bytes(b"".join(public_file(pair).read_bytes() for pair in pairs))
    return new.replace(file)


def write(folder: Path) -> None:
    (folder / "model.keras").write_bytes(b"the model " * 20)
    (folder / "resume").mkdir()
    (folder / "resume" / "state").write_bytes(b"the rest")


def publish(run: RunDir, key: Path | None, step: int = STEP, name: str = "run") -> None:
    signer = None if key is None else Signer(key=SigningKey.read(key), run=name)
    publisher = CheckpointPublisher(run, keep=100, signer=signer)
    publisher.publish(step, write, epoch=None, final=False, metrics={}, signature=None, versions={})


def fetched(run: RunDir, accepted: AcceptedKeys, step: int = STEP) -> bytes:
    (checkpoint,) = [found for found in polled(RunSource(run, accepted=accepted)) if found.step == step]
    local = checkpoint.fetch(run.leases / str(checkpoint.step), verify=False)
    local.verify()
    return local.model_file.read_bytes()


def refusal(run: RunDir, accepted: AcceptedKeys, step: int = STEP) -> str:
    with pytest.raises(UntrustedCheckpointError) as refused:
        fetched(run, accepted, step)
    return str(refused.value)


def test_a_signed_checkpoint_is_accepted_also_with_one_of_several_keys(run: RunDir, keys: Keys) -> None:
    publish(run, keys.own)
    for accepted in (keys.accepted(), keys.accepted(keys.other, keys.own)):
        assert fetched(run, accepted) == b"the model " * 20


def test_an_unsigned_checkpoint_is_refused_until_it_is_signed(run: RunDir, keys: Keys) -> None:
    publish(run, None)
    source = RunSource(run, accepted=keys.accepted())
    (unsigned,) = polled(source)
    with pytest.raises(UntrustedCheckpointError, match="is not signed; sign it with understudy sign"):
        unsigned.fetch(run.leases / "7")
    sign_checkpoint(run.checkpoint(STEP), SigningKey.read(keys.own))
    (signed,) = polled(source)
    assert signed.digest != unsigned.digest
    assert signed.fetch(run.leases / "7").step == STEP
    assert fetched(run, keys.accepted()) == b"the model " * 20


def test_a_checkpoint_signed_with_another_key_is_refused_by_its_identifier(run: RunDir, keys: Keys) -> None:
    publish(run, keys.other)
    other = SigningKey.read(keys.other).identifier
    assert f"signed with the key {other}, which is not accepted" in refusal(run, keys.accepted())


def test_a_signed_checkpoint_is_of_its_step_and_run_only(run: RunDir, keys: Keys, tmp_path: Path) -> None:
    publish(run, keys.own)
    shutil.copytree(run.checkpoint(STEP), run.checkpoint(9))
    assert "manifest of step 7" in refusal(run, keys.accepted(), 9)
    another = RunDir(tmp_path / "another")
    shutil.copytree(run.checkpoint(STEP), another.checkpoint(STEP))
    assert "signed for the run 'run', accepted is 'another'" in refusal(another, keys.accepted(run="another"))


def test_nothing_is_parsed_before_its_signature_is_valid(
    run: RunDir, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[bytes] = []
    monkeypatch.setattr(manifest_module, "decode_manifest", lambda content, **_: parsed.append(content))
    publish(run, keys.other)
    publish(run, None, 8)
    RunSource(run, accepted=keys.accepted()).poll()
    assert parsed == []


def test_a_checkpoint_that_must_be_signed_is_copied_so_that_its_writer_cannot_change_what_was_checked(
    run: RunDir, keys: Keys
) -> None:
    publish(run, keys.own)
    (checkpoint,) = polled(RunSource(run, accepted=keys.accepted()))
    local = checkpoint.fetch(run.leases / "000000000007")
    with (run.checkpoint(STEP) / "model.keras").open("r+b") as file:
        file.write(b"THE")
    assert checkpoint.copies
    local.verify()
    local.release()
    with pytest.raises(DamagedCheckpointError, match="SHA-256"):
        checkpoint.fetch(run.leases / "000000000007")


def test_a_checkpoint_exchanged_after_the_poll_is_checked_again(run: RunDir, keys: Keys) -> None:
    publish(run, keys.own)
    (checkpoint,) = polled(RunSource(run, accepted=keys.accepted()))
    remove_folder(run.checkpoint(STEP))
    publish(run, keys.other)
    with pytest.raises(UntrustedCheckpointError, match="signed with the key"):
        checkpoint.fetch(run.leases / "000000000007")
    remove_folder(run.checkpoint(STEP))
    publish(run, keys.own, 8)
    run.checkpoint(8).rename(run.checkpoint(STEP))
    with pytest.raises(CheckpointGoneError, match="replaced"):
        checkpoint.fetch(run.leases / "000000000007")


def test_what_an_earlier_process_leased_without_a_signature_is_refused(run: RunDir, keys: Keys) -> None:
    for key, step in ((None, 1), (keys.own, 2)):
        publish(run, key, step)
    for checkpoint in polled(RunSource(run)):
        checkpoint.fetch(run.leases / f"{checkpoint.step}")
    with pytest.raises(UntrustedCheckpointError, match="is not signed"):
        open_local_checkpoint(run.leases / "1", accepted=keys.accepted())
    with pytest.raises(UntrustedCheckpointError, match="is not signed"):
        open_local_checkpoint(run.leases / "2", accepted=keys.accepted())  # Without keys, no signature is leased.
    (_, signed) = polled(RunSource(run, accepted=keys.accepted()))
    signed.fetch(run.leases / "2")
    assert open_local_checkpoint(run.leases / "2", accepted=keys.accepted()).step == 2


@pytest.fixture(scope="module")
def signed_files(tmp_path_factory: pytest.TempPathFactory, keys: Keys) -> tuple[RunDir, list[tuple[Path, int]]]:
    """Return a run with a signed checkpoint, and the place of each of its bytes."""
    run = RunDir(tmp_path_factory.mktemp("altered") / "run")
    publish(run, keys.own)
    files = sorted(path for path in run.checkpoint(STEP).rglob("*") if path.is_file())
    assert len(files) == 4
    return run, [(file, place) for file in files for place in range(file.stat().st_size)]


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), how=st.sampled_from(["flip", "truncate", "extend", "remove"]))
def test_any_byte_that_differs_is_refused(
    signed_files: tuple[RunDir, list[tuple[Path, int]]], keys: Keys, seed: int, how: str
) -> None:
    run, places = signed_files
    chance = random.Random(seed)  # noqa: S311 - no secrets here
    file = chance.choice(sorted({file for file, _ in places}))
    good = file.read_bytes()
    place = chance.randrange(len(good))
    bad = bytearray(good)
    if how == "flip":
        bad[place] ^= 1 << chance.randrange(8)
    alter: dict[str, Callable[[], object]] = {
        "flip": lambda: file.write_bytes(bad),
        "truncate": lambda: file.write_bytes(good[:place]),
        "extend": lambda: file.write_bytes(good + good[: place + 1]),
        "remove": file.unlink,
    }
    alter[how]()
    try:
        found = polled(RunSource(run, accepted=keys.accepted()))
        assert [checkpoint.step for checkpoint in found] == ([] if not run.committed_steps() else [STEP])
        for checkpoint in found:
            with pytest.raises((UntrustedCheckpointError, DamagedCheckpointError)):
                checkpoint.fetch(run.leases / "000000000007", verify=False).verify()
    finally:
        file.write_bytes(good)
        remove_folder(run.leases / "000000000007")


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    folder = tmp_path / "theirs"
    folder.mkdir()
    return folder


class Clock:
    """A clock that goes only when told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def foreign_refusal(source: FolderSource, clock: Clock, into: Path) -> str:
    """Return why the only checkpoint of a folder is refused, once it counts as written."""
    assert polled(source) == []
    clock.now += 6
    (refused,) = polled(source)
    with pytest.raises(UntrustedCheckpointError) as error:
        refused.fetch(into)
    return str(error.value)


def test_a_foreign_file_is_read_once_it_has_a_signature_beside_it(
    theirs: Path, tmp_path: Path, keys: Keys, write_keras: WriteKeras
) -> None:
    clock = Clock()
    accepted = keys.accepted(run="theirs")
    source = FolderSource(theirs, tmp_path / "staging", accepted=accepted, clock=clock)
    file = write_keras(theirs / "model-0100.keras")
    text = foreign_refusal(source, clock, tmp_path / "lease")
    assert "is not signed: there is no model-0100.keras.sig; write it with understudy sign" in text
    assert sign_checkpoint(file, SigningKey.read(keys.own)) == theirs / "model-0100.keras.sig"
    (signed,) = polled(source)
    assert signed.step == 100
    private = signed.fetch(tmp_path / "lease").directory
    assert open_local_checkpoint(private, accepted=accepted).step == 100
    (private / "checkpoint.sig").unlink()
    with pytest.raises(UntrustedCheckpointError):
        open_local_checkpoint(private, accepted=accepted)


def test_a_foreign_file_with_the_signature_of_another_is_refused(
    theirs: Path, tmp_path: Path, keys: Keys, write_keras: WriteKeras
) -> None:
    clock = Clock()
    file = write_keras(theirs / "model-0100.keras")
    signature = sign_checkpoint(file, SigningKey.read(keys.own))
    file.rename(theirs / "model-0200.keras")
    signature.rename(theirs / "model-0200.keras.sig")
    source = FolderSource(theirs, tmp_path / "staging", accepted=keys.accepted(run="theirs"), clock=clock)
    assert "has the signature of model-0100.keras" in foreign_refusal(source, clock, tmp_path / "lease")


def test_every_altered_byte_of_a_foreign_file_or_its_signature_is_refused(
    theirs: Path, tmp_path: Path, keys: Keys, write_keras: WriteKeras
) -> None:
    file = write_keras(theirs / "model-0100.keras")
    signature = sign_checkpoint(file, SigningKey.read(keys.own))
    chance = random.Random(3)  # noqa: S311 - no secrets here
    for altered in (file, signature):
        good = altered.read_bytes()
        for place in chance.sample(range(len(good)), 12):
            bad = bytearray(good)
            bad[place] ^= 1 << chance.randrange(8)
            altered.write_bytes(bad)
            clock = Clock()
            source = FolderSource(theirs, tmp_path / "staging", accepted=keys.accepted(run="theirs"), clock=clock)
            foreign_refusal(source, clock, tmp_path / "lease")
        altered.write_bytes(good)


def test_a_link_out_of_the_writer_s_folder_is_refused(theirs: Path, tmp_path: Path, write_keras: WriteKeras) -> None:
    clock = Clock()
    write_keras(tmp_path / "secret.keras")
    (theirs / "model-1.keras").symlink_to(tmp_path / "secret.keras")
    source = FolderSource(theirs, tmp_path / "staging", clock=clock)
    assert polled(source) == []
    clock.now += 6
    (linked,) = polled(source)
    with pytest.raises(DamagedCheckpointError, match="symbolic link out of"):
        linked.fetch(tmp_path / "lease")
    write_keras(theirs / "model-2.keras", weight=2.0)
    (theirs / "latest.keras").symlink_to("model-2.keras")
    assert [checkpoint.step for checkpoint in polled(source)] == [1, 2]


def test_a_private_key_is_for_its_owner_and_never_overwritten(tmp_path: Path) -> None:
    key = tmp_path / "trainer.key"
    write_key_pair(key)
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    with pytest.raises(KeyFileError, match="never overwritten"):
        write_key_pair(key)
    key.chmod(0o640)
    with pytest.raises(KeyFileError, match=r"permissions 0640.*chmod 600"):
        SigningKey.read(key)


def test_a_key_of_another_kind_is_refused_by_what_it_is(tmp_path: Path) -> None:
    key = tmp_path / "trainer.key"
    write_key_pair(key)
    with pytest.raises(KeyFileError, match="is a private key, which belongs to the trainer alone"):
        AcceptedKeys([key], run="run")
    public_file(key).chmod(0o600)
    with pytest.raises(KeyFileError, match="no private key in PEM format"):
        SigningKey.read(public_file(key))
    with pytest.raises(KeyFileError, match="cannot be read: No such file"):
        SigningKey.read(tmp_path / "missing")


def test_a_file_holds_several_keys_of_which_each_is_accepted(run: RunDir, keys: Keys, tmp_path: Path) -> None:
    accepted = AcceptedKeys([write_keys(tmp_path / "keys.pem", keys.own, keys.other)], run="run")
    for step, key in ((1, keys.own), (2, keys.other)):
        publish(run, key, step)
        assert fetched(run, accepted, step) == b"the model " * 20


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not one public key in PEM format after the other"),
        (b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n", "holds what is no public key"),
        (b"#" * 70_000, "too many for a file of keys"),
        (None, "cannot be read"),
        ("a pipe", "is no regular file"),
        ("cut off", "the last one is cut off"),
        ("private", "is a private key"),
    ],
)
def test_keys_that_cannot_be_used_change_nothing_and_are_logged_once(
    keys: Keys, tmp_path: Path, content: bytes | str | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_keys(tmp_path / "keys.pem", keys.own)
    accepted = AcceptedKeys([file], run="run")
    before = accepted.identifiers
    if content is None:
        file.unlink()
    elif content == "a pipe":
        file.unlink()
        os.mkfifo(file)
    elif content == "cut off":
        file.write_bytes(file.read_bytes() + public_file(keys.other).read_bytes()[:60])
    elif content == "private":
        file.write_bytes(file.read_bytes() + keys.other.read_bytes())
    else:
        assert isinstance(content, bytes)
        file.write_bytes(content)
    accepted.refresh()
    accepted.refresh()
    assert (accepted.identifiers, accepted.is_current) == (before, False)
    (line,) = [record for record in caplog.records if "kept the old keys" in record.message]
    assert reason in line.__dict__["reason"]
    file.unlink(missing_ok=True)
    write_keys(file, keys.other)
    accepted.refresh()
    assert accepted.is_current
    assert accepted.identifiers == {SigningKey.read(keys.other).identifier}


def test_a_refused_checkpoint_is_looked_at_again_once_its_key_is_accepted(
    run: RunDir, keys: Keys, tmp_path: Path
) -> None:
    file = write_keys(tmp_path / "keys.pem", keys.own)
    accepted = AcceptedKeys([file], run="run")
    source = RunSource(run, accepted=accepted)
    publish(run, keys.own, 1)
    publish(run, keys.other, 2)
    publish(run, None, 3)
    first, refused, unsigned = polled(source)
    seen = source.peek()
    assert polled(source) == [first, refused, unsigned]
    write_keys(file, keys.own, keys.other)
    assert source.peek() == seen
    accepted.refresh()
    assert source.peek() != seen
    same, accepted_now, still_unsigned = polled(source)
    assert (same, still_unsigned.digest) == (first, unsigned.digest)
    assert accepted_now.digest != refused.digest
    assert accepted_now.fetch(run.leases / "2").step == 2


def test_a_checkpoint_is_refused_once_its_key_is_no_longer_accepted(run: RunDir, keys: Keys, tmp_path: Path) -> None:
    file = write_keys(tmp_path / "keys.pem", keys.own, keys.other)
    accepted = AcceptedKeys([file], run="run")
    source = RunSource(run, accepted=accepted)
    publish(run, keys.own, 1)
    publish(run, keys.other, 2)
    first, second = polled(source)
    write_keys(file, keys.own)
    accepted.refresh()
    with pytest.raises(UntrustedCheckpointError, match="which is not accepted"):
        second.fetch(run.leases / "2")
    same, refused = polled(source)
    assert same == first
    with pytest.raises(UntrustedCheckpointError, match="which is not accepted"):
        refused.fetch(run.leases / "2")


def test_a_foreign_file_is_looked_at_again_when_the_accepted_keys_change(
    theirs: Path, tmp_path: Path, keys: Keys, write_keras: WriteKeras
) -> None:
    clock = Clock()
    file = write_keys(tmp_path / "keys.pem", keys.own)
    accepted = AcceptedKeys([file], run="theirs")
    source = FolderSource(theirs, tmp_path / "staging", accepted=accepted, clock=clock)
    sign_checkpoint(write_keras(theirs / "model-0100.keras"), SigningKey.read(keys.other))
    assert "which is not accepted" in foreign_refusal(source, clock, tmp_path / "lease")
    seen = source.peek()
    write_keys(file, keys.other)
    accepted.refresh()
    assert source.peek() != seen
    (signed,) = polled(source)
    assert signed.fetch(tmp_path / "lease").step == 100
    write_keys(file, keys.own)
    accepted.refresh()
    (refused,) = polled(source)
    with pytest.raises(UntrustedCheckpointError, match="which is not accepted"):
        refused.fetch(tmp_path / "lease")


def test_a_key_of_openssl_will_do(run: RunDir, tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl")
    key = tmp_path / "openssl.key"
    subprocess.run([openssl, "genpkey", "-algorithm", "ed25519", "-out", key], check=True, timeout=30)
    subprocess.run([openssl, "pkey", "-in", key, "-pubout", "-out", public_file(key)], check=True, timeout=30)
    key.chmod(0o600)
    publish(run, key)
    assert fetched(run, AcceptedKeys([public_file(key)], run="run"))
