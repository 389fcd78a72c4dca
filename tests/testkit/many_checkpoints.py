"""Thousands of checkpoints to watch, and what a watcher reads of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from testkit.watcher_harness import WatcherHarness
from understudy.checkpoints import manifest


class Reading:
    """Counts what is read of checkpoints."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.manifests, self.hashes = 0, 0
        decode, describe = manifest.decode_manifest, manifest.describe_file

        def decoding(*args: Any, **options: Any) -> Any:
            self.manifests += 1
            return decode(*args, **options)

        def describing(*args: Any) -> Any:
            self.hashes += 1
            return describe(*args)

        patch.setattr(manifest, "decode_manifest", decoding)
        patch.setattr(manifest, "describe_file", describing)


def publish_many(harness: WatcherHarness, count: int) -> None:
    """Put as many checkpoints into the run folder: copies of one, under other steps."""
    harness.lifecycle.write(0)
    original = harness.lifecycle.run.checkpoint(0)
    whole = manifest.read_manifest(original)
    for step in range(1, count):
        folder = harness.lifecycle.run.checkpoint(step)
        folder.mkdir()
        (folder / "model.keras").hardlink_to(original / "model.keras")
        (folder / "manifest.json").write_bytes(manifest.encode_manifest(replace(whole, step=step)))
