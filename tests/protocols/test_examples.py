"""The examples of `clients/examples` do what they say."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from protocols.conftest import ROOT, Fetch

from testkit.fetched import INSTALL_SECONDS
from testkit.served import Pair
from understudy.clients import Client

pytestmark = pytest.mark.timeout(INSTALL_SECONDS + 60)

EXAMPLES = ROOT / "clients" / "examples"
SECONDS = 60


def output_of(*command: str, **environment: str) -> str:
    completed = subprocess.run(
        command, capture_output=True, text=True, timeout=SECONDS, check=False, env={**os.environ, **environment}
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def test_node_gets_what_the_native_client_gets(fetch: Fetch, served: Pair, native_plain: Client) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("Node is not on PATH")
    modules = fetch("node") / "node_modules"
    rows = [[0.1, -2.5, 3e30], [1.0, 0.0, -0.25]]

    printed = output_of(
        node, str(EXAMPLES / "node" / "predict.js"), served.plain.grpc, json.dumps(rows), NODE_PATH=str(modules)
    )

    answer = json.loads(printed)
    expected = native_plain.predict(np.array(rows, np.float32))
    assert answer["predict"] == {"step": 3, "values": expected.output.ravel().tolist()}
    assert answer["modelInfer"] == {"id": "from-node", **answer["predict"]}


def test_the_python_example_takes_a_model_of_any_datatypes(served: Pair) -> None:
    printed = output_of(sys.executable, str(EXAMPLES / "python" / "predict.py"), served.every.grpc)
    assert "out_bfloat16, computed at step 7" in printed


def test_every_package_of_the_node_example_has_a_hash_and_names_no_registry() -> None:
    lock = json.loads((EXAMPLES / "node" / "package-lock.json").read_text())
    packages = {name: package for name, package in lock["packages"].items() if name}
    assert len(packages) > len(lock["packages"][""]["dependencies"])
    assert all(package["integrity"].startswith("sha512-") for package in packages.values())
    assert not any("resolved" in package for package in packages.values())
