#!/usr/bin/env bash
# Puts Debian's prometheus and promtool under .tools/prometheus, without root and without installing anything, for the tests that
# have a real Prometheus scrape the service. Where that cannot be done it says why and ends with 0: those tests then skip, saying so.
set -euo pipefail
cd "$(dirname "$0")/.."
target=.tools/prometheus
[ -x "$target/usr/bin/promtool" ] && exit 0
if command -v promtool >/dev/null && command -v prometheus >/dev/null; then exit 0; fi
if ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
  echo "prometheus is not on PATH and this is no Debian: its tests will be skipped" >&2
  exit 0
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$scratch/lists/partial" "$scratch/cache/archives/partial"
options=(-qq -o "Dir::State::lists=$scratch/lists" -o "Dir::Cache=$scratch/cache" -o APT::Sandbox::User=root)
if (cd "$scratch" && timeout 180 apt-get "${options[@]}" update && timeout 180 apt-get "${options[@]}" download prometheus) \
  >"$scratch/log" 2>&1; then
  mkdir -p "$target"
  dpkg-deb --extract "$scratch"/prometheus_*.deb "$target"
else
  echo "Debian's prometheus could not be fetched, so its tests will be skipped: $(tail -n 1 "$scratch/log")" >&2
fi
