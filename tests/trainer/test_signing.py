"""A training signs what it publishes, and resumes only from what is signed."""

from __future__ import annotations

from pathlib import Path

import pytest

from testkit.polling import polled
from testkit.training_harness import Linear, Noisy, cluster, run
from understudy.checkpoints import (
    AcceptedKeys,
    KeyFileError,
    RunDir,
    RunSource,
    SigningKey,
    UntrustedCheckpointError,
    read_manifest,
    sign_checkpoint,
)
from understudy.checkpoints.signing import public_file, write_key_pair
from understudy.trainer.callbacks import PublishCheckpoint


@pytest.fixture
def key(tmp_path: Path) -> Path:
    write_key_pair(tmp_path / "trainer.key")
    return tmp_path / "trainer.key"


def accepted_steps(run_dir: Path, *keys: Path, name: str | None = None) -> list[int]:
    """Return the steps whose checkpoints are whole and signed."""
    accepted = AcceptedKeys([public_file(key) for key in keys], run=name or run_dir.name)
    found = polled(RunSource(RunDir(run_dir), accepted=accepted))
    return [checkpoint.fetch(run_dir / "leases" / str(checkpoint.step)).step for checkpoint in found]


def test_a_training_resumes_from_a_signed_checkpoint_and_from_no_other(tmp_path: Path, key: Path) -> None:
    run_dir = tmp_path / "run"
    run(Linear(), run_dir, steps=2, checkpoint_every=2)
    with pytest.raises(UntrustedCheckpointError, match="is not signed; sign it with understudy sign"):
        run(Linear(), run_dir, steps=4, checkpoint_every=2, sign_key=key)
    sign_checkpoint(RunDir(run_dir).checkpoint(2), SigningKey.read(key))
    assert run(Linear(), run_dir, steps=4, checkpoint_every=2, sign_key=key).first_step == 2
    assert accepted_steps(run_dir, key) == [2, 4]

    newer = tmp_path / "newer.key"
    write_key_pair(newer)
    with pytest.raises(UntrustedCheckpointError, match="signed with the key"):
        run(Linear(), run_dir, steps=6, checkpoint_every=2, sign_key=newer)
    run(Linear(), run_dir, steps=6, checkpoint_every=2, sign_key=newer, require_signature=(public_file(key),))
    assert accepted_steps(run_dir, key, newer) == [2, 4, 6]


def test_an_unusable_key_is_found_before_the_training(tmp_path: Path, key: Path) -> None:
    key.chmod(0o644)
    with pytest.raises(KeyFileError, match="chmod 600"):
        run(Linear(), tmp_path / "run", steps=2, sign_key=key)
    with pytest.raises(KeyFileError, match="chmod 600"):
        PublishCheckpoint(tmp_path / "run", sign_key=key)


def test_the_callback_signs(tmp_path: Path, key: Path) -> None:
    run_dir = tmp_path / "run"
    model = Noisy().build_model()
    data = Noisy().training_data().batch(25)
    callback = PublishCheckpoint(run_dir, sign_key=key, run_name="mine")
    model.fit(data, epochs=1, callbacks=[callback], shuffle=False, verbose=0)
    assert accepted_steps(run_dir, key, name="mine") == [4]


def test_in_a_cluster_the_chief_signs_and_a_worker_resumes_with_the_public_key_only(tmp_path: Path, key: Path) -> None:
    run_dir = tmp_path / "run"
    replicas = {"devices": ("CPU:0", "CPU:1"), "cross_device_ops": "reduction_to_one_device"}
    run(Linear(), run_dir, steps=2, checkpoint_every=2, strategy="mirrored", sign_key=key, **replicas)
    options = ("--steps", "4", "--checkpoint-every", "2", "--steps-per-call", "2", "--no-tensorboard")
    keys = ("--require-signature", str(public_file(key)))
    environs = ({"UNDERSTUDY_SIGN_KEY": str(key)},)
    with cluster("Linear", run_dir, *options, *keys, roles=("chief", "worker"), environs=environs) as tasks:
        assert [task.end() for task in tasks] == [0, 0], tasks[0].errors
        assert "resuming after step 2" in "".join(tasks[1].lines)
    assert accepted_steps(run_dir, key) == [2, 4]
    assert read_manifest(RunDir(run_dir).checkpoint(4)).run == "run"
