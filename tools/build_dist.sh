#!/usr/bin/env bash
# Builds the sdists of understudy-client and understudy, and a wheel from each sdist, into a folder. Replaces those there.
#
#     tools/build_dist.sh [FOLDER]    # dist by default
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/uv_index.sh
folder=$(realpath -m "${1:-dist}")
rm -f "$folder"/understudy*
for project in clients .; do
  "$uv" build --quiet --python .venv/bin/python --build-constraint constraints.txt --out-dir "$folder" "$project"
done
