#!/usr/bin/env bash
# Unpacks Debian's prometheus and promtool under .tools/prometheus, without root and without installing them, for the tests that
# have a real Prometheus scrape the service. On failure it prints the reason and exits with 0; those tests are then skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/debian_packages.sh
target=.tools/prometheus
[ -x "$target/usr/bin/promtool" ] && exit 0
if command -v promtool >/dev/null && command -v prometheus >/dev/null; then exit 0; fi
unpack_debian_packages "$target" prometheus || echo "so prometheus could not be fetched, and its tests will be skipped" >&2
