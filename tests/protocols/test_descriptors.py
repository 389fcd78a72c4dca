"""Our own description of the protocol is the public one, as far as it goes."""

from __future__ import annotations

import pytest
from protocols.calls.descriptors import description
from protocols.conftest import Fetch, report_of

from testkit.fetched import INSTALL_SECONDS
from understudy.oip import inference_pb2, model_config_pb2

pytestmark = pytest.mark.timeout(INSTALL_SECONDS + 60)


def test_names_and_numbers_are_the_public_ones(fetch: Fetch) -> None:
    public = report_of(fetch("triton") / "bin" / "python", "descriptors.py")
    ours = description(model_config_pb2, inference_pb2)

    assert ours["service"] == public["service"]
    assert ours["methods"] == public["methods"]
    assert {name: number for name, number in public["fields"].items() if name in ours["fields"]} == ours["fields"]
