"""The files of other projects are those that their list says, and small."""

from __future__ import annotations

import gzip
import hashlib
import re
from importlib import resources

VENDOR = resources.files("understudy.service.page").joinpath("static", "vendor")
LINE = re.compile(r"\| `(\S+)` \| `\S+` \| \S+ \| `\S+` \| `([0-9a-f]{64})` \| \S+ `(\S+)` \|")
MAX_BYTES = 150 * 1024


def test_every_vendored_file_has_its_digest_and_its_licence() -> None:
    listed = LINE.findall(VENDOR.joinpath("README.md").read_text(encoding="utf-8"))

    assert {file.name for file in VENDOR.iterdir()} == {
        "README.md",
        *(name for name, _, _ in listed),
        *(licence for _, _, licence in listed),
    }
    for name, digest, licence in listed:
        assert hashlib.sha256(VENDOR.joinpath(name).read_bytes()).hexdigest() == digest, name
        assert "BSD" in VENDOR.joinpath(licence).read_text(encoding="utf-8")


def test_the_scripts_are_small() -> None:
    scripts = [file for file in VENDOR.iterdir() if file.name.endswith(".js")]

    assert scripts
    assert sum(len(gzip.compress(file.read_bytes(), 9)) for file in scripts) <= MAX_BYTES
