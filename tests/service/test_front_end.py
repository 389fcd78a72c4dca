"""How a front end is found."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from understudy.service.front_end import load_front_end
from understudy.service.grpcio import grpc_server
from understudy.service.service_errors import SettingsError


def test_the_front_ends_of_this_project_are_found() -> None:
    assert load_front_end("grpcio") is grpc_server.run
    assert load_front_end("envoy").__module__ == "understudy.service.envoy.envoy_server"


def test_a_front_end_of_another_package_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other_front_end.py").write_text("def run(settings, main): ...\n")
    metadata = tmp_path / "other_front_end-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other-front-end\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[understudy.front_ends]\nother = other_front_end:run\n")
    monkeypatch.syspath_prepend(tmp_path)

    assert load_front_end("other") is sys.modules["other_front_end"].run


def test_an_unknown_front_end_is_refused_with_those_that_are_installed() -> None:
    with pytest.raises(SettingsError, match=r"frontend is 'apache'; installed are envoy, grpcio"):
        load_front_end("apache")
