"""The image: what the service needs of it."""

from __future__ import annotations

import json
import re

from testkit.manifests import ROOT, image_environment

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def test_the_health_check_asks_where_the_service_says_that_it_listens() -> None:
    (check,) = re.findall(r"^HEALTHCHECK .*\\\n\s+CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)

    assert json.loads(check) == ["understudy", "health"]
    assert image_environment()["UNDERSTUDY_ADDRESS_FILE"].startswith("/dev/shm/")  # noqa: S108 - the image's


def test_the_image_asks_for_the_driver_s_parts_and_keeps_compiled_kernels_where_it_can_write() -> None:
    environment = image_environment()
    (volume,) = re.findall(r"^VOLUME (\S+)$", DOCKERFILE, re.MULTILINE)

    assert environment["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"
    assert environment["CUDA_CACHE_PATH"].startswith(f"{volume}/")
    assert int(environment["CUDA_CACHE_MAXSIZE"]) >= 2**30
    assert "NVIDIA_VISIBLE_DEVICES" not in environment  # it would make the service expect GPUs everywhere


def test_the_image_leaves_it_open_whether_other_machines_are_served_without_tls() -> None:
    assert image_environment()["UNDERSTUDY_HOST"] == "0.0.0.0"  # noqa: S104 - the container's
    assert not image_environment().keys() & {"UNDERSTUDY_INSECURE", "UNDERSTUDY_TLS_CERT"}
