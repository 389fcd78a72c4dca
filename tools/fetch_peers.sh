#!/usr/bin/env bash
# Installs the servers that `make bench-peers` measures under .tools/peers, each in its own environment with the versions
# of tools/peers/NAME.txt: triton (the nvidia-pytriton wheel, which holds Triton itself and pytriton), kserve, mlserver.
#
#     tools/fetch_peers.sh [NAME...]
#
# Existing installations are kept. Triton's Python backend is linked with the system's libpython 3.11, so the interpreter
# is the system's own; PYTHON=... chooses another 3.11. Exits with 1 and the reason if a download fails.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-/usr/bin/python3}
names=("$@")
[ ${#names[@]} -gt 0 ] || names=(triton kserve mlserver)

"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || {
  echo "$python is no Python 3.11, with which the peers were tried; give PYTHON=/path/to/python3.11" >&2
  exit 1
}
for name in "${names[@]}"; do
  versions=tools/peers/$name.txt
  target=.tools/peers/$name
  [ -f "$versions" ] || { echo "there is no $name; give triton, kserve or mlserver" >&2; exit 1; }
  cmp -s "$versions" "$target/.holds" && continue
  echo "Installing $name into $target; its packages are large, so this takes minutes."
  rm -rf "$target"
  mkdir -p "$(dirname "$target")"
  "$python" -m venv "$target"
  "$target/bin/pip" install --quiet --disable-pip-version-check --retries 2 --timeout 60 -r "$versions"
  cp "$versions" "$target/.holds"
done
