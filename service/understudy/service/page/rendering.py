"""Renders pages, and gives every answer its headers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import resources
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from starlette.responses import HTMLResponse, Response, StreamingResponse

from understudy.evaluator.evaluator_errors import VersionNotFoundError
from understudy.service.calls.served_call import REQUEST_ID_HEADER
from understudy.service.calls.status import Code, Failure
from understudy.service.page import chart
from understudy.service.page.page_call import PageCall
from understudy.service.readiness import Readiness
from understudy.service.rest.rest_call import response_to_failure

_POLICY: Final = (
    "default-src 'none'; style-src 'self'; img-src 'self' data:; script-src 'self'; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
)
_HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",  # with no-referrer, browsers send forms without their origin
    "cache-control": "no-store",
}
UNBUFFERED: Final[Mapping[str, str]] = {"x-accel-buffering": "no"}
"""Tells nginx to pass on a response as it is made."""
_STATIC_CACHE: Final = "private, max-age=86400"
"""The links to these files change with their contents."""
_STATIC: Final[Mapping[str, tuple[str, str]]] = {
    "page.css": ("page.css", "text/css"),
    "page.js": ("page.js", "text/javascript"),
    "htmx.js": ("vendor/htmx.min.js", "text/javascript"),
    "sse.js": ("vendor/sse.min.js", "text/javascript"),
}
_MARKER: Final = Markup("<!-- here -->")
_PACKAGE: Final = "understudy.service.page"


class Renderer:
    """Renders pages from the templates of the package. Thread-safe.

    Args:
        model_name: The name of the model.
        readiness: The state of the service.
    """

    def __init__(self, model_name: str, readiness: Readiness) -> None:
        self._model_name = model_name
        self._readiness = readiness
        self._static = {name: _packaged(file) for name, (file, _) in _STATIC.items()}
        self._templates = _templates(self._static)

    def part(self, name: str, values: Mapping[str, Any]) -> str:
        """Return a rendered part of a page."""
        return self._templates.get_template(name).render(values)

    def readiness(self) -> dict[str, str]:
        """Return the state of the service in a word and in a sentence."""
        return {"state": self._readiness.state.name.lower(), "readiness": self._readiness.reason}

    def page(self, name: str, call: PageCall, **values: Any) -> str:
        """Return a rendered page, which is brief beside its parts."""
        frame = {"root": root_of(call), "model": self._model_name, **self.readiness()}
        return self._templates.get_template(name).render(frame | values)

    def halves(self, name: str, call: PageCall, **values: Any) -> tuple[str, str]:
        """Return a rendered page before and after its ``marker``."""
        before, _, after = self.page(name, call, marker=_MARKER, **values).partition(_MARKER)
        return before, after

    def static(self, name: str) -> Response:
        """Return a file of the package.

        Raises:
            VersionNotFoundError: There is none of this name.
        """
        if name not in _STATIC:
            raise VersionNotFoundError(f"the page has no file {name!r}")
        return Response(self._static[name], media_type=_STATIC[name][1], headers={"cache-control": _STATIC_CACHE})

    def failed_part(self, call: PageCall) -> str:
        """Return what the page of a failure says."""
        return self.part("failed.html", {"root": root_of(call), "message": call.failure.message})

    def failed(self, call: PageCall) -> Response:
        """Return the page of a failure."""
        failure: Failure = call.failure
        plain = response_to_failure(failure)
        content = self.page("failure.html", call, status=plain.status_code, message=failure.message)
        response = HTMLResponse(content, status_code=plain.status_code)
        if "retry-after" in plain.headers:
            response.headers["retry-after"] = plain.headers["retry-after"]
        if failure.code is Code.UNAUTHENTICATED:
            response.headers["www-authenticate"] = 'Basic realm="understudy", charset="UTF-8"'
        return with_headers(response, call)


def streamed(media_type: str, call: PageCall) -> Response:
    """Return a response, without its body, that a proxy passes on as it is made."""
    response = StreamingResponse(iter(()), media_type=media_type, headers=UNBUFFERED)
    return with_headers(response, call)


def with_headers(response: Response, call: PageCall) -> Response:
    """Return a response with the headers that every answer has."""
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)
    response.headers[REQUEST_ID_HEADER] = call.request_id
    return response


def root_of(call: PageCall) -> str:
    """Return the path under which a proxy serves the page; empty without one."""
    return str(call.request.scope.get("root_path", ""))


def _templates(static: Mapping[str, bytes]) -> Environment:
    environment = Environment(
        loader=PackageLoader(_PACKAGE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": _shown,
        "brief": _brief,
        "utc": _utc,
        "iso": _iso,
        "mib": _mib,
        "duration": _duration,
    }
    digests = {name: hashlib.sha256(content).hexdigest()[:16] for name, content in static.items()}
    environment.globals |= {"digests": digests, "chart": chart}
    return environment


def _packaged(file: str) -> bytes:
    return resources.files(_PACKAGE).joinpath("static", *file.split("/")).read_bytes()


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def _brief(value: float | None) -> str:
    """Return a number for those who want to know about how large it is."""
    if value is not None and _THOUSAND <= abs(value) < _BILLION:
        return f"{value:,.0f}"
    return "-" if value is None else f"{value:.4g}"


_THOUSAND: Final = 1e3
_BILLION: Final = 1e9


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < _MINUTE:
        return f"{seconds:.3g} s"
    if seconds < _HOUR:
        return f"{seconds / _MINUTE:.3g} min"
    return f"{seconds / _HOUR:,.1f} h"


_MINUTE: Final = 60.0
_HOUR: Final = 3600.0


def _mib(size: float) -> str:
    return f"{size / 1024 / 1024:,.0f} MiB"


def _utc(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
