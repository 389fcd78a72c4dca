"""Looks for known vulnerabilities in the packages of requirements/, with pip-audit.

    tools/audit.py [--advisories all.zip] [--strict]

The exit status is 1 if one was found. Without a source of advisories nothing can be checked; that is said, and is a
failure only with --strict. An export of OSV for PyPI (a zip archive of JSON files) needs no network:
pip-audit then asks a server in this process, which speaks as much of OSV's protocol as that needs.
"""

from __future__ import annotations

import argparse
import contextlib
import http.server
import json
import re
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PIP_AUDIT = Path(sys.executable).with_name("pip-audit")
TIMEOUT_SECONDS = 600
LARGEST_QUERY_BYTES = 2**16
NOTHING_FOUND = "nothing could be checked for known vulnerabilities"


def main() -> int:
    """Check all lists of packages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--advisories", type=Path, help="an export of OSV for PyPI: a zip archive of JSON files")
    parser.add_argument("--strict", action="store_true", help="fail if a package could not be checked")
    arguments = parser.parse_args()
    lists = sorted((ROOT / "requirements").glob("*.txt"))
    if arguments.advisories is None:
        found, error = audit(lists, [])
    else:
        with served(read_advisories(arguments.advisories)) as url:
            found, error = audit(lists, ["--vulnerability-service", "osv", "--osv-url", url])
    return report(found, error, strict=arguments.strict)


def audit(lists: list[Path], options: list[str]) -> tuple[dict[str, Any], str]:
    """Run pip-audit; return what it says of each package, by name and version, and the error if it ended with one."""
    packages: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "found.json"
        for requirements in lists:
            output.unlink(missing_ok=True)
            command = [str(PIP_AUDIT), "--require-hashes", "--disable-pip", "--progress-spinner", "off", *options]
            command += ["--requirement", str(requirements), "--format", "json", "--output", str(output)]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
            if not output.exists() or not output.stat().st_size:
                return packages, (ended.stderr.strip().splitlines() or ["pip-audit said nothing"])[-1]
            for package in json.loads(output.read_text())["dependencies"]:
                packages[f"{package['name']} {package.get('version', package.get('skip_reason'))}"] = package
    return packages, ""


def report(packages: dict[str, Any], error: str, *, strict: bool) -> int:
    """Print what was found; return the exit status."""
    vulnerable = {name: package["vulns"] for name, package in packages.items() if package.get("vulns")}
    checked = sum("vulns" in package for package in packages.values())
    for name, advisories in vulnerable.items():
        for advisory in advisories:
            fixed = ", ".join(advisory["fix_versions"]) or "no version"
            print(f"{name}: {advisory['id']}, fixed in {fixed}")
    if error or not checked:
        reason = error or "the registry has no advisories; give an export of OSV with ADVISORIES=all.zip"
        print(f"{NOTHING_FOUND if not checked else f'only {checked} packages could be checked'}: {reason}")
    else:
        print(f"{checked} of {len(packages)} packages checked, {len(vulnerable)} with known vulnerabilities")
    return 1 if vulnerable or (strict and (error or checked < len(packages))) else 0


def read_advisories(archive: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the advisories of an export of OSV by the normalized names of their packages."""
    advisories = defaultdict(list)
    with zipfile.ZipFile(archive) as export:
        for name in export.namelist():
            advisory = json.loads(export.read(name))
            names = {normalized(affected["package"]["name"]) for affected in advisory.get("affected", ())}
            for package in names:
                advisories[package].append(advisory)
    return advisories


def matching(advisories: list[dict[str, Any]], package: str, version: str) -> list[dict[str, Any]]:
    """Return the advisories that list a version; OSV lists the versions of PyPI's packages one by one."""
    return [
        advisory
        for advisory in advisories
        if "withdrawn" not in advisory
        and any(
            normalized(affected["package"]["name"]) == package and version in affected.get("versions", ())
            for affected in advisory["affected"]
        )
    ]


def normalized(name: str) -> str:
    """Return a package's name as registries compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


@contextlib.contextmanager
def served(advisories: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    """Answer OSV's queries on a port of this machine; yield the URL."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            query = json.loads(self.rfile.read(min(int(self.headers["Content-Length"]), LARGEST_QUERY_BYTES)))
            package = normalized(query["package"]["name"])
            found = matching(advisories.get(package, []), package, query["version"])
            body = json.dumps({"vulns": found} if found else {}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Write no access log."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/query"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


if __name__ == "__main__":
    sys.exit(main())
