#!/usr/bin/env bash
# Unpacks Debian's h2load and its libraries under .tools/nghttp2, without root and without installing them, for the
# benchmarks and their tests. On failure it exits with 1 and the reason; the tests are then skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/debian_packages.sh
target=.tools/nghttp2
[ -x "$target/usr/bin/h2load" ] && exit 0
command -v h2load >/dev/null && exit 0
unpack_debian_packages --with-dependencies "$target" nghttp2-client || {
  echo "so h2load could not be fetched; where there is no apt, install nghttp2 and put h2load on PATH" >&2
  exit 1
}
