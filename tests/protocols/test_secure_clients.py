"""Clients of every kind over TLS with a token, with and without client certificates, against every front end."""

from __future__ import annotations

import json
import os
import re
import shutil
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from protocols.conftest import Fetch, Report, report_of
from protocols.test_examples import EXAMPLES, output_of

from testkit.certificates import replace
from testkit.checkpoints import ones
from testkit.fetched import INSTALL_SECONDS
from testkit.front_ends import AVAILABLE
from testkit.in_process import until
from testkit.prometheus_tools import scraping, value_of
from testkit.secure_sites import READERS_TOKEN, STEP, Site, serving_sites, write_sites
from understudy.clients import AsyncClient, Client, PermissionDeniedError, UnauthenticatedError

pytestmark = [pytest.mark.long, pytest.mark.timeout(INSTALL_SECONDS + 60)]

NAMES = [f"{front_end} {way}" for front_end in AVAILABLE for way in ("token", "certificate")]
EXPECTED = [2.5 * STEP, 0.5 * STEP]
"""The outputs for the examples of `calls/secure.py`."""
BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 1, 1, 1]}]}
REMEDY = "send a(uthorization: Bearer TOKEN| token)"
SECONDS = 30.0


@pytest.fixture(scope="module")
def sites(logical_cpus: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Site]]:
    with serving_sites(tmp_path_factory.mktemp("sites"), AVAILABLE, logical_cpus[:1]) as running:
        yield {site.name: site for site in running}


@pytest.fixture(params=NAMES)
def site(request: pytest.FixtureRequest, sites: dict[str, Site]) -> Site:
    return sites[request.param]


@pytest.fixture(scope="module")
def sites_file(sites: dict[str, Site], tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("secure") / "sites.json"
    write_sites(list(sites.values()), file)
    return file


@pytest.fixture(scope="module")
def triton(fetch: Fetch, sites_file: Path) -> Report:
    return report_of(fetch("triton") / "bin" / "python", "secure.py", "triton", sites_file)


@pytest.fixture(scope="module")
def tfserving(fetch: Fetch, sites_file: Path) -> Report:
    return report_of(fetch("tfserving") / "bin" / "python", "secure.py", "tfserving", sites_file)


async def test_our_clients_and_commands(site: Site) -> None:
    with Client(site.grpc, credentials=site.channel(), token_file=site.token_file) as client:
        assert client.predict(ones(1)).step == STEP
    async with AsyncClient(site.grpc, credentials=site.channel(), token=site.token) as asynchronous:
        assert (await asynchronous.predict(ones(1))).step == STEP
    printed = output_of(sys.executable, "-m", "understudy.cli", "status", "--json", **site.environment())
    assert json.loads(printed)["serving_step"] == STEP


@pytest.mark.parametrize("token", [None, "unknown"])
async def test_our_clients_say_what_a_caller_without_a_known_token_should_do(site: Site, token: str | None) -> None:
    remedy = "token.*--token-file of the commands"
    with Client(site.grpc, credentials=site.channel(), token=token) as client:
        with pytest.raises(UnauthenticatedError, match=remedy):
            client.predict(ones(1))
        with pytest.raises(UnauthenticatedError, match=remedy):
            next(client.watch_evaluations())
        assert client.is_serving()
    async with AsyncClient(site.grpc, credentials=site.channel(), token=token) as asynchronous:
        with pytest.raises(UnauthenticatedError, match=remedy):
            await asynchronous.predict(ones(1))
        outcomes = asynchronous.predict_many([{"x": ones(1)}])
        with pytest.raises(UnauthenticatedError, match=remedy):
            await anext(outcomes)


def test_our_client_says_which_group_a_caller_lacks(site: Site) -> None:
    with Client(site.grpc, credentials=site.channel(), token=READERS_TOKEN) as client:
        assert client.predict(ones(1)).step == STEP
        with pytest.raises(PermissionDeniedError, match=r"reader may not call Promote, as .* the group promote; ask"):
            client.unpin()


def test_a_new_token_in_the_file_is_used_without_a_restart(site: Site, tmp_path: Path) -> None:
    file = tmp_path / "token"
    with Client(site.grpc, credentials=site.channel(), token_file=_written(file, "replaced")) as client:
        with pytest.raises(UnauthenticatedError):
            client.predict(ones(1))
        _written(file, site.token)
        assert client.predict(ones(1)).step == STEP


def _written(file: Path, token: str) -> Path:
    replace(file, token.encode())
    return file


@pytest.mark.parametrize("way", ["grpc", "http"])
def test_tritonclient(way: str, site: Site, triton: Report) -> None:
    found = triton[site.name]
    assert found[f"{way} ready"] is True
    assert found[way] == found[f"{way}.aio"] == EXPECTED
    assert re.search(REMEDY, found[f"{way} without a token"])


def test_the_stubs_of_tensorflow_serving(site: Site, tfserving: Report) -> None:
    assert tfserving[site.name]["grpc"] == EXPECTED
    assert re.search(REMEDY, tfserving[site.name]["grpc without a token"])


def test_the_node_client(site: Site, fetch: Fetch) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("Node is not on PATH")
    modules = fetch("node") / "node_modules"
    program = str(EXAMPLES / "node" / "predict.js")
    printed = output_of(node, program, site.grpc, "[[1, 1, 1, 1]]", NODE_PATH=str(modules), **site.environment())
    answer = json.loads(printed)
    assert answer["predict"] == {"step": STEP, "values": [STEP] * 8}
    assert answer["modelInfer"]["values"] == [STEP] * 8


def test_the_python_example(site: Site) -> None:
    program = str(EXAMPLES / "python" / "predict.py")
    assert f"y, computed at step {STEP}" in output_of(sys.executable, program, site.grpc, **site.environment())


def test_curl_and_httpx_over_rest(site: Site) -> None:
    url, headers = f"https://{site.http}/v2/models/model/infer", {"authorization": f"Bearer {site.token}"}
    asked = httpx.post(url, json=BODY, headers=headers, verify=site.context()).raise_for_status()
    assert asked.json()["outputs"][0]["data"] == [STEP] * 8
    values: dict[str, Any] = {
        "url": f"https://{site.http}/v1/models/model:predict",
        "json": {"instances": [[1, 1, 1, 1]]},
    }
    with httpx.Client(verify=site.context()) as client:
        assert client.post(**values, headers=headers).json() == {"predictions": [[STEP] * 8]}
        assert client.post(**values).status_code == 401
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not on PATH")
    own = ("--cert", site.certificate, "--key", site.key) if site.certificate and site.key else ()
    token = ("--header", f"authorization: Bearer {site.token}")
    printed = output_of(curl, "-fsS", "--cacert", site.ca, *own, *token, "--data", json.dumps(BODY), url)
    assert json.loads(printed)["outputs"] == asked.json()["outputs"]
    status = ("-o", os.devnull, "-w", "%{http_code}")
    assert output_of(curl, "-sS", "--cacert", site.ca, *own, *status, "--data", json.dumps(BODY), url) == "401"
    unknown = subprocess.run([curl, "-sS", *own, *token, url], capture_output=True, timeout=SECONDS, check=False)
    assert unknown.returncode == 60, unknown.stderr  # an authority that it does not know


@pytest.mark.parametrize("site", [name for name in NAMES if name.endswith("token")], indirect=True)
def test_a_real_prometheus(site: Site, tmp_path: Path) -> None:
    job = {
        "scheme": "https",
        "tls_config": {"ca_file": site.ca},
        "authorization": {"credentials_file": site.token_file},
    }
    with scraping(site.http, tmp_path, **job) as prometheus:
        until(lambda: value_of(prometheus, "understudy_serving_step") == STEP)


def test_probes_need_no_token(site: Site) -> None:
    with grpc.secure_channel(site.grpc, site.channel()) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "understudy.v1.PredictionService", "inference.GRPCInferenceService"):
            answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=SECONDS)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
    anybody = ssl.create_default_context(cafile=site.ca)
    with httpx.Client(base_url=f"https://{site.http}", verify=anybody) as kubelet:
        assert [kubelet.get(path).status_code for path in ("/healthz", "/readyz")] == [200, 200]
