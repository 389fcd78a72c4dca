#!/usr/bin/env bash
# Installs third-party clients under .tools/clients, each in its own environment, for the tests that run them against this
# server: triton (tritonclient), tfserving (tensorflow-serving-api), node (the packages of clients/examples/node); and the
# types of Kubernetes' resources that the tests of the manifests need: manifests (of tests/deployment/models).
#
#     tools/fetch_clients.sh triton|tfserving|node|manifests
#
# Existing installations are kept. Exits with 1 and the reason if an index cannot be reached, with 2 if Node is
# missing.
set -euo pipefail
cd "$(dirname "$0")/.."
kind=${1:?say which: triton, tfserving, node or manifests}
target=.tools/clients/$kind
python=${PYTHON:-.venv/bin/python}

source= # of packages for Node
# Marks the content of a folder; a change here recreates it.
case $kind in
  triton) packages=("tritonclient[grpc,http]==2.73.0") ;;
  tfserving) packages=("tensorflow-serving-api==2.21.0" --constraint constraints.txt) ;;
  node) source=clients/examples/node ;;
  manifests) source=tests/deployment/models ;;
  *) echo "there is no $kind; give triton, tfserving, node or manifests" >&2; exit 1 ;;
esac
[ -z "$source" ] || packages=("$(sha256sum "$source/package-lock.json")")
stamp=$target/.holds
[ "$(cat "$stamp" 2>/dev/null || true)" = "${packages[*]}" ] && exit 0

rm -rf "$target"
mkdir -p "$target"
if [ -n "$source" ]; then
  command -v npm >/dev/null && command -v node >/dev/null || { echo "Node and npm are not on PATH" >&2; exit 2; }
  cp "$source"/{package.json,package-lock.json,.npmrc} "$target"
  (cd "$target" && npm ci --silent --no-audit --no-fund --ignore-scripts) # exactly the lockfile's, by their hashes
else
  "$python" -m venv "$target"
  "$target/bin/pip" install --quiet --disable-pip-version-check --retries 2 --timeout 20 "${packages[@]}"
fi
echo "${packages[*]}" >"$stamp"
