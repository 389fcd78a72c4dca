#!/usr/bin/env bash
# Puts other people's clients under .tools/clients, each in an environment of its own, for the tests that run them against this
# server: triton (tritonclient), tfserving (tensorflow-serving-api), node (@grpc/grpc-js).
#
#     tools/fetch_clients.sh triton|tfserving|node
#
# What is there already is left as it is. Ends with 1 and says why where an index cannot be reached; ends with 2 where Node is
# missing.
set -euo pipefail
cd "$(dirname "$0")/.."
kind=${1:?say which: triton, tfserving or node}
target=.tools/clients/$kind
python=${PYTHON:-.venv/bin/python}

# Says that a folder holds this, whatever it was made with; a change here makes it anew.
case $kind in
  triton) packages=("tritonclient[grpc,http]==2.73.0") ;;
  tfserving) packages=("tensorflow-serving-api==2.21.0" --constraint constraints.txt) ;;
  node) packages=("@grpc/grpc-js@1.14.7" "@grpc/proto-loader@0.8.1") ;;
  *) echo "there is no $kind; give triton, tfserving or node" >&2; exit 1 ;;
esac
stamp=$target/.holds
[ "$(cat "$stamp" 2>/dev/null || true)" = "${packages[*]}" ] && exit 0

rm -rf "$target"
mkdir -p "$target"
if [ "$kind" = node ]; then
  command -v npm >/dev/null && command -v node >/dev/null || { echo "Node and npm are not on PATH" >&2; exit 2; }
  npm install --silent --no-audit --no-fund --ignore-scripts --prefix "$target" "${packages[@]}"
else
  "$python" -m venv "$target"
  "$target/bin/pip" install --quiet --disable-pip-version-check --retries 2 --timeout 20 "${packages[@]}"
fi
echo "${packages[*]}" >"$stamp"
